// The type of an access of so many bytes, and accesses of up to 16 bytes, one beside the other.
#pragma once
#include "scalar.cuh"

template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef unsigned char type; };
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef unsigned type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };

template <int BYTES> struct Accesses {
  static constexpr int EACH = BYTES < 16 ? BYTES : 16;
  typedef typename Bits<EACH>::type bits;
};

template <int BYTES> DEVICE void load_bytes(const void* at, void* to) {
  typedef Accesses<BYTES> Of;
#pragma unroll
  for (int b = 0; b < BYTES; b += Of::EACH) {
    const typename Of::bits some = __ldg((const typename Of::bits*)((const char*)at + b));
    memcpy((char*)to + b, &some, Of::EACH);
  }
}

template <int BYTES> DEVICE void store_bytes(void* at, const void* from) {
  typedef Accesses<BYTES> Of;
#pragma unroll
  for (int b = 0; b < BYTES; b += Of::EACH) {
    typename Of::bits some;
    memcpy(&some, (const char*)from + b, Of::EACH);
    *(typename Of::bits*)((char*)at + b) = some;
  }
}
