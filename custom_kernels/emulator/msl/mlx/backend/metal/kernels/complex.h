// Stands in for MLX's complex numbers, whose members are written once for each address space in a way that only Metal's
// compiler reads. Bodies that compute with complex numbers cannot be emulated.
#pragma once
#include "metal_stdlib"

using namespace metal;

template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
};
using complex64_t = complex_t<float>;
