// Gradients of parameters: each block sums its rows' parts in a slot of its own.
#pragma once
#include "heads.cuh"

#define GROUPS (THREADS / LANES)
#define IN_SHARED (NV * VEC <= 16)  // whether a lane's sums wait in shared memory

// The items of a launch of any number of blocks, in turns; every lane of a warp takes as many.
struct Turns {
  long long item, first;
  DEVICE_MEMBER Turns() { item = group_of_launch(), first = item - threadIdx.x % 32 / LANES; }
  DEVICE_MEMBER void next() {
    const long long stride = (long long)gridDim.x * GROUPS;
    item += stride, first += stride;
  }
};

// Sums of a row's numbers over the items of a lane, in double: they are long, of terms of either
// sign.
struct ParameterSums {
#if IN_SHARED
  typedef double Memory[NV * VEC][THREADS];
  DEVICE_MEMBER double& at(Memory& memory, int n, int v) {
    return memory[n * VEC + v][threadIdx.x];
  }
#else
  typedef double Memory[VEC][THREADS];
  double own[NV][VEC];
  DEVICE_MEMBER double& at(Memory& memory, int n, int v) { return own[n][v]; }
#endif
  DEVICE_MEMBER static Memory& memory() {
    __shared__ Memory sums;
    return sums;
  }

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) at(memory(), n, v) = 0;
  }

  // Adds left * right; where right is zero nothing, so that a row that no edge reaches may be NaN.
  DEVICE_MEMBER void add(const acc_t (&left)[NV][VEC], const acc_t (&right)[NV][VEC]) {
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        at(memory(), n, v) += right[n][v] == 0 ? 0 : (double)left[n][v] * right[n][v];
  }

  // Writes the sums over the groups of the block to its row of `slots`.
  DEVICE_MEMBER void store(double* slots, const Place& place) {
    Memory& sums = memory();
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int first = IN_SHARED ? n * VEC : 0;
#if !IN_SHARED
      __syncthreads();
#pragma unroll
      for (int v = 0; v < VEC; v++) sums[v][threadIdx.x] = own[n][v];
#endif
      __syncthreads();
      if (threadIdx.x >= LANES || !place.inside(n)) continue;
      for (int v = 0; v < VEC; v++) {
        double total = 0;
        for (int g = 0; g < GROUPS; g++) total += sums[first + v][g * LANES + threadIdx.x];
        slots[(long long)blockIdx.x * place.width + place.feature(n) + v] = total;
      }
    }
  }
};
