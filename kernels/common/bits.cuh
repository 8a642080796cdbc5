// The type of an access of so many bytes.
#pragma once

template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef unsigned char type; };
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef unsigned type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };
