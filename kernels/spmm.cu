// spmm — weighted sums of the rows of each target's sources, nothing edge-sized stored.
// Maths     out[i] = sum_k weight[k, h] * scale[idx[k]] * x[idx[k]]  over the edges k of row i
// Shapes    x [S, width]  out [N, width]  weight [E, heads] or null  scale [S] or null
//           partial [T, width] (acc_t)  rowptr [N + 1]  idx [E]  tiles [T, 4]
// Mapping   LANES lanes a row or tile, NV accesses of VEC numbers a lane; wider rows by blockIdx.y
// Traffic   gathers E rows of x (4 bytes of idx each; weight where given, in its order); out once
// Numerics  acc_t sums in edge order, tiles merged in order; mean divides by the degree; no atomics
// Limits    VEC divides width, and width / heads where heads > 1
#include "common/merge.cuh"
#include "common/rows.cuh"
#include "common/vec.cuh"
#include "common/weight.cuh"

#ifndef BATCH
#define BATCH 1  // of kernels that take no edges
#define RESIDENT 1
#endif

DEVICE void divide(acc_t (&values)[VEC], acc_t by) {
#pragma unroll
  for (int v = 0; v < VEC; v++) values[v] /= by;
}

template <bool FULL>
DEVICE void add_batch(acc_t (&sum)[NV][VEC], int k, int end, int f0,
                      const index_t* __restrict__ idx, const scalar_t* __restrict__ x,
                      const scalar_t* __restrict__ weight, const scalar_t* __restrict__ scale,
                      int width, int heads, int channels) {
  index_t source[BATCH];
  Packed row[BATCH][NV];
  acc_t factor[BATCH][NV];
#pragma unroll
  for (int u = 0; u < BATCH; u++) source[u] = FULL || k + u < end ? __ldg(idx + k + u) : -1;
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = (FILLED || f < width) && (FULL || source[u] >= 0);
      const scalar_t* at = in_row(x, source[u], width, f);
      row[u][n] = inside ? load_packed(at) : zero_packed();
#if WEIGHTED || SCALED
      factor[u][n] = inside ? 1 : 0;  // outside the value is 0 too
#endif
#if WEIGHTED
      if (inside)
        factor[u][n] = weight_of(weight, k + u, f, heads, channels);
#endif
#if SCALED
      if (inside) factor[u][n] *= widen(__ldg(scale + source[u]));
#endif
    }
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      acc_t value[VEC];
      unpack(row[u][n], value);
#pragma unroll
      for (int v = 0; v < VEC; v++) {
#if WEIGHTED || SCALED
        sum[n][v] += factor[u][n] * value[v];
#else
        sum[n][v] += value[v];
#endif
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    spmm(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
         const long long* __restrict__ tiles, const scalar_t* __restrict__ x,
         const scalar_t* __restrict__ weight, const scalar_t* __restrict__ scale,
         scalar_t* __restrict__ out, acc_t* __restrict__ partial, long long num_rows,
         long long num_tiles, long long split, int width, int heads, int mean) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int f0 = (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC, channels = width / heads;
  acc_t sum[NV][VEC] = {};
  const int count = (int)(it.end - it.begin);
  idx += it.begin;
  if (WEIGHTED) weight += it.begin * (WEIGHTED == 2 ? heads : 1);
  int k = 0;
#pragma unroll 1
  for (; k + BATCH <= count; k += BATCH)
    add_batch<true>(sum, k, count, f0, idx, x, weight, scale, width, heads, channels);
  if (k < count)
    add_batch<false>(sum, k, count, f0, idx, x, weight, scale, width, heads, channels);
  const acc_t degree = max(count, 1);
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    if (!FILLED && f >= width) continue;
    if (it.part >= 0) {
      store_words(partial + it.part * width + f, sum[n]);
    } else {
      if (mean) divide(sum[n], degree);
      store(out + it.row * width + f, sum[n]);
    }
  }
}

struct Tables {
  const acc_t* partial;
  const index_t* rowptr;
  scalar_t* out;
  int width, mean;
};

struct Sum {
  acc_t values[VEC];
  DEVICE_MEMBER Sum() {}
  DEVICE_MEMBER Sum(const Tables& t, long long part, int f) {
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] = t.partial[part * t.width + f + v];
  }
  DEVICE_MEMBER void add(const Sum& other) {
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] += other.values[v];
  }
  DEVICE_MEMBER void finish(const Tables& t, long long row, int f) {
    if (t.mean) divide(values, (acc_t)(t.rowptr[row + 1] - t.rowptr[row]));
    store(t.out + row * t.width + f, values);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    spmm_merge(const index_t* __restrict__ rowptr, const long long* __restrict__ tiles,
               const acc_t* __restrict__ partial, scalar_t* __restrict__ out, long long num_tiles,
               int width, int mean) {
  const Tables tables = {partial, rowptr, out, width, mean};
  merge_rows<Sum>(tables, tiles, num_tiles, width);
}
