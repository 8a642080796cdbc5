// column_sums — sums over rows, as gradients of biases are.
// Maths     slots[b] = sum_i x[i]  over the rows i that block b takes
// Shapes    x [N, width]  slots [blocks, width] (double)
// Mapping   LANES lanes a row, NV accesses of VEC numbers a lane; wider rows by blockIdx.y
// Traffic   x once
// Numerics  double; the order depends on the number of blocks only
// Limits    VEC divides width
#include "common/rows.cuh"
#include "common/vec.cuh"

#define GROUPS (THREADS / LANES)

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sums(const scalar_t* __restrict__ x, double* __restrict__ slots, long long num_rows,
                int width) {
  __shared__ double memory[VEC][THREADS];
  const int f0 = (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC;
  const long long stride = (long long)gridDim.x * GROUPS;
  double sum[NV][VEC] = {};
  for (long long row = group_of_launch(); row < num_rows; row += BATCH * stride) {
    Packed values[BATCH][NV];
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int f = f0 + n * LANES * VEC;
        const bool inside = (FILLED || f < width) && row + u * stride < num_rows;
        values[u][n] = inside ? load_packed(x + (row + u * stride) * width + f) : zero_packed();
      }
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        acc_t some[VEC];
        unpack(values[u][n], some);
#pragma unroll
        for (int v = 0; v < VEC; v++) sum[n][v] += some[v];
      }
  }
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VEC; v++) memory[v][threadIdx.x] = sum[n][v];
    __syncthreads();
    if (threadIdx.x >= LANES || (!FILLED && f >= width)) continue;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      double total = 0;
      for (int g = 0; g < GROUPS; g++) total += memory[v][g * LANES + threadIdx.x];
      slots[(long long)blockIdx.x * width + f + v] = total;
    }
  }
}
