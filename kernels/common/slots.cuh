// Gradients of parameters: each block sums its rows' parts in a slot of its own.
#pragma once
#include "heads.cuh"

#define GROUPS (THREADS / LANES)

// The items of a launch of any number of blocks, in turns; every lane of a warp takes as many.
struct Turns {
  long long item, first, stride;
  DEVICE_MEMBER Turns() {
    item = group_of_launch(), first = item - threadIdx.x % 32 / LANES;
    stride = (long long)gridDim.x * GROUPS;
  }
  DEVICE_MEMBER void next() { item += stride, first += stride; }
};

// sum += left * right, in double: the sums are long, and their terms of either sign
DEVICE void add_products(double (&sum)[NV][VEC], const acc_t (&left)[NV][VEC],
                         const acc_t (&right)[NV][VEC]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) sum[n][v] += (double)left[n][v] * right[n][v];
}

// Writes the sums over the groups of a block to its row of `slots`.
DEVICE void store_slot(double* slots, const Place& place, const double (&sum)[NV][VEC]) {
  __shared__ double shared[THREADS][VEC];
#pragma unroll
  for (int n = 0; n < NV; n++) {
#pragma unroll
    for (int v = 0; v < VEC; v++) shared[threadIdx.x][v] = sum[n][v];
    __syncthreads();
    if (threadIdx.x < LANES && place.inside(n))
      for (int v = 0; v < VEC; v++) {
        double total = 0;
        for (int g = 0; g < GROUPS; g++) total += shared[g * LANES + threadIdx.x][v];
        slots[(long long)blockIdx.x * place.width + place.feature(n) + v] = total;
      }
    __syncthreads();
  }
}
