// What a kernel expects of CUDA, for g++: types, qualifiers, intrinsics and atomics.
//
// A kernel file is compiled unchanged, with this file before it and HOST_KERNEL(name) after it. The
// threads of a block are fibers of one CPU thread (host_cuda.cpp): each runs alone until it waits.
// Left out: __activemask, dynamic shared memory (a launch carries no size), streams, z dimensions.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // the C headers alone: <cmath> takes longer than a kernel
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host_cuda.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
// Blocks run one after another: one copy, which the driver overwrites before each block.
#define __shared__ static __attribute__((section("host_shared")))
#define warpSize 32

#define HOST_VECTOR(T, NAME, ALIGN)                                                       \
  struct alignas(ALIGN / 2) NAME##2 { T x, y; };                                          \
  struct NAME##3 { T x, y, z; };                                                          \
  struct alignas(ALIGN) NAME##4 { T x, y, z, w; };                                        \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                              \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                      \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define uint3 host_uint3  // the built-in variables have it already
HOST_VECTOR(int, int, 16)
HOST_VECTOR(unsigned, uint, 16)
HOST_VECTOR(float, float, 16)
HOST_VECTOR(short, short, 8)
HOST_VECTOR(unsigned short, ushort, 8)
HOST_VECTOR(unsigned char, uchar, 4)
#undef uint3
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
inline double2 make_double2(double x, double y) { return {x, y}; }
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

namespace host {

template <class To, class From> inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T> inline T exchange(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
  Word word = 0;
  memcpy(&word, &value, sizeof(T));
  word = meet(SHUFFLE, mask, word, source, site);
  memcpy(&value, &word, sizeof(T));
  return value;
}

inline void check_width(int width) {
  if (width < 1 || width > 32 || (width & (width - 1))) fail("a shuffle of width %d", width);
}

// Calls a kernel with the arguments that the pointers lead to.
struct Call {
  template <class... A> Call(void (*kernel)(A...), A... args) { kernel(args...); }
};
template <class... A> inline void invoke(void (*kernel)(A...), void** params) {
  Call{kernel, *(A*)*params++...};  // braces: from left to right
}

}  // namespace host

extern "C" __attribute__((weak, visibility("hidden"))) char __start_host_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_host_shared[];

#define HOST_KERNEL(NAME)                                                                   \
  extern "C" __attribute__((visibility("default"))) const char* run_##NAME(                 \
      unsigned x, unsigned y, unsigned threads, void** params, unsigned long long seed) {   \
    auto run = [](void** given) { host::invoke(NAME, given); };                             \
    return host::launch({#NAME, run, __start_host_shared, __stop_host_shared}, x, y,        \
                        threads, params, seed);                                             \
  }

// Barriers, votes and shuffles. The last two parameters name the place of the call in errors.
#define HOST_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define HOST_SITE host::Site{__func__, file, line}

inline void __syncthreads(HOST_AT) { host::meet_block(host::SYNC, false, HOST_SITE); }
inline int __syncthreads_count(int p, HOST_AT) { return host::meet_block(host::ADD, p, HOST_SITE); }
inline int __syncthreads_or(int p, HOST_AT) { return host::meet_block(host::OR, p, HOST_SITE) > 0; }
inline int __syncthreads_and(int p, HOST_AT) {
  return host::meet_block(host::AND, !p, HOST_SITE) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HOST_AT) {
  host::meet(host::SYNC, mask, 0, 0, HOST_SITE);
}
#define HOST_VOTE(RETURN, NAME, T, OP)                                        \
  inline RETURN NAME(unsigned mask, T value, HOST_AT) {                       \
    return (RETURN)host::meet(host::OP, mask, value, 0, HOST_SITE);           \
  }
HOST_VOTE(unsigned, __ballot_sync, int, BALLOT)
HOST_VOTE(int, __any_sync, int, ANY)
HOST_VOTE(int, __all_sync, int, ALL)
HOST_VOTE(unsigned, __reduce_add_sync, unsigned, ADD)
HOST_VOTE(int, __reduce_add_sync, int, ADD)
HOST_VOTE(unsigned, __reduce_min_sync, unsigned, UMIN)
HOST_VOTE(int, __reduce_min_sync, int, MIN)
HOST_VOTE(unsigned, __reduce_max_sync, unsigned, UMAX)
HOST_VOTE(int, __reduce_max_sync, int, MAX)
HOST_VOTE(unsigned, __reduce_and_sync, unsigned, AND)
HOST_VOTE(unsigned, __reduce_or_sync, unsigned, OR)
HOST_VOTE(unsigned, __reduce_xor_sync, unsigned, XOR)
HOST_VOTE(unsigned, __match_any_sync, unsigned, MATCH_ANY)
HOST_VOTE(unsigned, __match_any_sync, int, MATCH_ANY)
HOST_VOTE(unsigned, __match_any_sync, unsigned long long, MATCH_ANY)
HOST_VOTE(unsigned, __match_any_sync, long long, MATCH_ANY)

template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, HOST_AT) {
  host::check_width(width);
  const int first = host::lane() & -width;
  return host::exchange(mask, value, first + (from & (width - 1)), HOST_SITE);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_AT) {
  host::check_width(width);
  const int lane = host::lane(), inside = lane & (width - 1);
  const int from = (unsigned)inside < delta ? lane : lane - (int)delta;
  return host::exchange(mask, value, from, HOST_SITE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_AT) {
  host::check_width(width);
  const int lane = host::lane(), left = width - 1 - (lane & (width - 1));
  const int from = (unsigned)left < delta ? lane : lane + (int)delta;
  return host::exchange(mask, value, from, HOST_SITE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, HOST_AT) {
  host::check_width(width);
  const int lane = host::lane(), other = lane ^ bits;
  return host::exchange(mask, value, other > (lane | (width - 1)) ? lane : other, HOST_SITE);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}
#define assert(CONDITION) \
  ((CONDITION) ? (void)0 : host::fail("%s:%d: assert(%s)", __FILE__, __LINE__, #CONDITION))
#define __trap() host::fail("%s:%d: __trap()", __FILE__, __LINE__)

// A load that the hardware would refuse is refused without a sanitizer too.
template <class T> inline T __ldg(const T* at) {
  if ((size_t)at % sizeof(T)) host::fail("a load of %zu bytes at %p", sizeof(T), (const void*)at);
  return *at;
}
template <class T> inline T __ldcs(const T* at) { return __ldg(at); }
template <class T> inline T __ldcg(const T* at) { return __ldg(at); }
template <class T> inline T __ldca(const T* at) { return __ldg(at); }
template <class T> inline void __stcs(T* at, T value) { *at = value; }
template <class T> inline void __stcg(T* at, T value) { *at = value; }

// Fibers switch only where they wait, so plain code is atomic.
#define HOST_ATOMIC(T, NAME, NEW)       \
  inline T NAME(T* at, T value) {       \
    const T old = *at;                  \
    *at = NEW;                          \
    return old;                         \
  }
#define HOST_ATOMICS(T)                                      \
  HOST_ATOMIC(T, atomicAdd, old + value)                     \
  HOST_ATOMIC(T, atomicExch, value)
#define HOST_INTEGER_ATOMICS(T)                              \
  HOST_ATOMICS(T)                                            \
  HOST_ATOMIC(T, atomicMin, old < value ? old : value)       \
  HOST_ATOMIC(T, atomicMax, old > value ? old : value)       \
  HOST_ATOMIC(T, atomicAnd, old& value)                      \
  HOST_ATOMIC(T, atomicOr, old | value)                      \
  HOST_ATOMIC(T, atomicXor, old ^ value)                     \
  inline T atomicCAS(T* at, T expected, T value) {           \
    const T old = *at;                                       \
    if (old == expected) *at = value;                        \
    return old;                                              \
  }
HOST_INTEGER_ATOMICS(int)
HOST_INTEGER_ATOMICS(unsigned)
HOST_INTEGER_ATOMICS(unsigned long long)
HOST_ATOMICS(float)
HOST_ATOMICS(double)
HOST_ATOMIC(int, atomicSub, old - value)
HOST_ATOMIC(unsigned, atomicSub, old - value)

// CUDA's own overloads, so that a call that is ambiguous there is so here.
#define HOST_ORDER(R, A, B)                                 \
  inline R min(A a, B b) { return (R)a < (R)b ? a : b; }    \
  inline R max(A a, B b) { return (R)a > (R)b ? a : b; }
#define HOST_ORDERS(S, U) \
  HOST_ORDER(S, S, S) HOST_ORDER(U, U, U) HOST_ORDER(U, S, U) HOST_ORDER(U, U, S)
HOST_ORDERS(int, unsigned)
HOST_ORDERS(long, unsigned long)
HOST_ORDERS(long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

inline long long abs(long long x) { return llabs(x); }
#define HOST_FLOAT(NAME) \
  inline float NAME(float x) { return NAME##f(x); }
#define HOST_FAST(NAME) \
  inline float __##NAME(float x) { return NAME(x); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
HOST_FLOAT(fabs)
HOST_FLOAT(sqrt)
HOST_FLOAT(exp)
HOST_FLOAT(exp2)
HOST_FLOAT(log)
HOST_FLOAT(log2)
HOST_FLOAT(tanh)
HOST_FLOAT(floor)
HOST_FLOAT(ceil)
HOST_FAST(expf)
HOST_FAST(logf)
HOST_FAST(log2f)
HOST_FAST(sinf)
HOST_FAST(cosf)
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float pow(float a, float b) { return powf(a, b); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }

inline float __int_as_float(int x) { return host::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return host::bits<float>(x); }
inline int __float_as_int(float x) { return host::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return host::bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return host::bits<double>(x); }
inline long long __double_as_longlong(double x) { return host::bits<long long>(x); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out = out << 1 | (x >> i & 1);
  return out;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline int __mulhi(int a, int b) { return (long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return (((unsigned long long)high << 32 | low) << (by & 31)) >> 32;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
