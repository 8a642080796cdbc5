// VEC numbers in one access of 2 to 16 bytes: the widest that rows and pointers are aligned to.
#pragma once
#include "bits.cuh"
#include "scalar.cuh"

typedef Bits<VEC * sizeof(scalar_t)>::type bits_t;

// Keeps the compiler from looking into how a value was found.
template <class T>
DEVICE T hidden(T value) {
#ifndef PORTABLE
  if constexpr (sizeof(T) == 8)
    asm("" : "+l"(value));
  else
    asm("" : "+r"(value));
#endif
  return value;
}

// Tells the compiler where hidden pointers point to.
#ifdef PORTABLE
#define ASSUME_GLOBAL(AT)
#else
#define ASSUME_GLOBAL(AT) __builtin_assume(__isGlobal(AT))
#endif

DEVICE long long wide_product(int a, int b) { return (long long)a * b; }
DEVICE long long wide_product(unsigned a, unsigned b) { return (unsigned long long)a * b; }
DEVICE long long wide_product(long long a, long long b) { return a * b; }

// Where a number of a row is. One instruction, as 32-bit factors are added to where the lane's
// numbers of the first row are; compilers that see how those were found take the sum apart.
template <class T, class Row>
DEVICE T* in_row(T* table, Row row, int width, int offset) {
  const Row bytes = hidden(width * (int)sizeof(T));
  const char* first = (const char*)hidden(table + offset);
  ASSUME_GLOBAL(first);
  return (T*)(first + wide_product(row, bytes));
}

// What one access brings, not yet widened: a batch of loads is issued before the first use.
struct Packed {
  bits_t bits;
};

DEVICE Packed load_packed(const scalar_t* at) { return {__ldg((const bits_t*)at)}; }
DEVICE Packed zero_packed() { return {}; }

DEVICE void unpack(const Packed& packed, acc_t (&to)[VEC]) {
#if SCALAR == 3 && VEC % 2 == 0
  unsigned words[VEC / 2];  // one instruction each, where a number taken out of its word is two
  memcpy(words, &packed.bits, sizeof(words));
#pragma unroll
  for (int v = 0; v < VEC; v++)
    to[v] = __uint_as_float(v % 2 ? words[v / 2] & 0xffff0000u : words[v / 2] << 16);
#else
  scalar_t values[VEC];
  memcpy(values, &packed.bits, sizeof(values));
#pragma unroll
  for (int v = 0; v < VEC; v++) to[v] = widen(values[v]);
#endif
}

// Keeps the numbers that were unpacked so far from waiting in registers for the next use.
DEVICE void unpack_anew(Packed& packed) {
#ifndef PORTABLE
  unsigned words[sizeof(packed) / 4 + 1];
  if (sizeof(scalar_t) > 2 || sizeof(packed) < 4) return;
  memcpy(words, &packed, sizeof(packed));
#pragma unroll
  for (int w = 0; w < sizeof(packed) / 4; w++) asm volatile("" : "+r"(words[w]));
  memcpy(&packed, words, sizeof(packed));
#endif
}

DEVICE void load(const scalar_t* at, acc_t (&to)[VEC]) { unpack(load_packed(at), to); }

DEVICE void store(scalar_t* at, const acc_t (&from)[VEC]) {
  scalar_t values[VEC];
#pragma unroll
  for (int v = 0; v < VEC; v++) values[v] = narrow(from[v]);
  bits_t bits;
  memcpy(&bits, values, sizeof(values));
  *(bits_t*)at = bits;
}

// Partials and places: VEC words, in accesses of up to 16 bytes.
template <class T> DEVICE void load_words(const T* at, T (&to)[VEC]) {
  load_bytes<VEC * sizeof(T)>(at, to);
}
template <class T> DEVICE void store_words(T* at, const T (&from)[VEC]) {
  store_bytes<VEC * sizeof(T)>(at, from);
}
