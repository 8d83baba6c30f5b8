// Eight numbers that a lane handles together, in float32 whatever they are in memory.

struct Eight {
  float values[8];
};

METAL_FUNC Eight operator*(Eight a, Eight b) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    a.values[i] *= b.values[i];
  }
  return a;
}

METAL_FUNC Eight operator*(Eight a, float factor) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    a.values[i] *= factor;
  }
  return a;
}

METAL_FUNC Eight operator+(Eight a, float more) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    a.values[i] += more;
  }
  return a;
}

METAL_FUNC Eight operator+(Eight a, Eight b) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    a.values[i] += b.values[i];
  }
  return a;
}

METAL_FUNC Eight zero_eight() {
  Eight to;
  UNROLL
  for (int i = 0; i < 8; ++i) {
    to.values[i] = 0.0f;
  }
  return to;
}

// A sum that one lane holds.
typedef float Partial;

METAL_FUNC Partial empty_partial() {
  return 0.0f;
}

METAL_FUNC float collapse(Partial sum) {
  return sum;
}

METAL_FUNC Partial add_products(Eight a, Eight b, Partial sum) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    sum += a.values[i] * b.values[i];
  }
  return sum;
}

METAL_FUNC Partial add_eight(Eight a, Partial sum) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    sum += a.values[i];
  }
  return sum;
}

METAL_FUNC float max_abs(Eight a, float most) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    most = max(most, fabs(a.values[i]));
  }
  return most;
}

// Eight values as they lie in memory.
template <typename T>
struct Packed {
  uint4 pairs;
};

template <>
struct Packed<float> {
  Eight values;
};

template <typename T>
METAL_FUNC uint load_pair(const device T* from) {
  return uint(as_type<ushort>(from[0])) | (uint(as_type<ushort>(from[1])) << 16);
}

// One access where the address allows it.
template <typename T>
METAL_FUNC void load_eight(const device T* from, thread Packed<T>& to) {
  if ((reinterpret_cast<ulong>(from) & 15) == 0) {
    to.pairs = *(const device uint4*)from;
  } else {
    to.pairs.x = load_pair(from);
    to.pairs.y = load_pair(from + 2);
    to.pairs.z = load_pair(from + 4);
    to.pairs.w = load_pair(from + 6);
  }
}

METAL_FUNC void load_eight(const device float* from, thread Packed<float>& to) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    to.values.values[i] = from[i];
  }
}

template <typename T>
METAL_FUNC void unpack_pair(uint pair, thread float* values) {
  values[0] = float(as_type<T>(ushort(pair & 0xffffu)));
  values[1] = float(as_type<T>(ushort(pair >> 16)));
}

template <typename T>
METAL_FUNC Eight unpack_eight(thread const Packed<T>& from) {
  Eight to;
  unpack_pair<T>(from.pairs.x, to.values);
  unpack_pair<T>(from.pairs.y, to.values + 2);
  unpack_pair<T>(from.pairs.z, to.values + 4);
  unpack_pair<T>(from.pairs.w, to.values + 6);
  return to;
}

METAL_FUNC Eight unpack_eight(thread const Packed<float>& from) {
  return from.values;
}

// scale * values + offset
template <typename T>
METAL_FUNC void store_eight(device T* to, Eight values, float scale, float offset) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    to[i] = T(scale * values.values[i] + offset);
  }
}

METAL_FUNC void store_eight(threadgroup float* to, Eight values, float scale, float offset) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    to[i] = scale * values.values[i] + offset;
  }
}
