// The primitives of metal/eight.h for one core: eight numbers are one vector.

typedef Float8 Eight;

METAL_FUNC Eight zero_eight() {
  return Eight{};
}

// A sum that is spread over eight lanes of a vector.
typedef Float8 Partial;

METAL_FUNC Partial empty_partial() {
  return Float8{};
}

METAL_FUNC float collapse(Partial sum) {
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

METAL_FUNC Partial add_products(Eight a, Eight b, Partial sum) {
  return sum + a * b;
}

METAL_FUNC Partial add_eight(Eight a, Partial sum) {
  return sum + a;
}

METAL_FUNC float max_abs(Eight, float most) {
  return most;
}

template <typename T>
struct Packed {
  Eight values;
};

template <typename T>
METAL_FUNC void load_eight(const T* from, Packed<T>& to) {
  float values[8];
  for (int i = 0; i < 8; ++i) {
    values[i] = float(from[i]);
  }
  memcpy(&to, values, sizeof to);
}

#if CONVERTS_HALF
METAL_FUNC void load_eight(const half* from, Packed<half>& to) {
  to.values = (Eight)widen_eight(from);
}
#endif

template <typename T>
METAL_FUNC Eight unpack_eight(const Packed<T>& from) {
  return from.values;
}

METAL_FUNC void store_eight(float* to, Eight values, float scale, float offset) {
  values = scale * values + offset;
  memcpy(to, &values, sizeof values);
}
