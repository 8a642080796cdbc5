// Combines the partials of each split row in a fixed order.
//
// A warp takes one tile and, if the tile is the first of its row, all partials of the row; rows of
// more than ALONE tiles are shared by the warps of the block, each taking every WARPS-th partial.
// A Sum has: values of VEC features, read(part, f), add(sum), and is written by `finish`.
#pragma once
#include "scalar.cuh"

#define WARPS (THREADS / 32)
#define ALONE 32

template <class Sum, class Tables>
DEVICE void merge_rows(const Tables& tables, const long long* tiles, long long num_tiles, int width) {
  __shared__ Sum shared[WARPS * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long first = (long long)blockIdx.x * WARPS;
  for (int w = 0; w < WARPS && first + w < num_tiles; w++) {
    const long long t = first + w, parts = tiles[4 * t + 3];
    if (parts <= ALONE) {
      if (w != warp || parts == 0) continue;
      for (int f = lane * VEC; f < width; f += 32 * VEC) {
        Sum sum(tables, t, f);
        for (long long p = 1; p < parts; p++) sum.add(Sum(tables, t + p, f));
        sum.finish(tables, tiles[4 * t], f);
      }
      continue;
    }
    for (int f = lane * VEC; f - lane * VEC < width; f += 32 * VEC) {
      if (f < width) {
        Sum sum(tables, t + warp, f);
#pragma unroll 4
        for (long long p = warp + WARPS; p < parts; p += WARPS) sum.add(Sum(tables, t + p, f));
        shared[threadIdx.x] = sum;
      }
      __syncthreads();
      if (warp == 0 && f < width) {
        Sum sum = shared[lane];
        for (int other = 1; other < WARPS; other++) sum.add(shared[other * 32 + lane]);
        sum.finish(tables, tiles[4 * t], f);
      }
      __syncthreads();
    }
  }
}
