// gatv2_lin, gatv2_attr — gradients of the map of edge features, and of the features.
// Maths     G[k, f] = s_k * leaky'(z[k, f]), from terms, as gatv2_target left them, and signs
//           slots sum to attr' G        grad_attr[k, d] = sum_f G[k, f] * att[f] * lin[d, f]
// Shapes    attr, grad_attr [E, D]  loop_attr, grad_loop [L, D] or null  lin [D, H*C]  att [H*C]
//           terms [E + L, H] (acc_t)  signs as in gatv2.cu  perm [E] or null
//           slots [blocks, D, H*C] (double)
// Mapping   lin: a block for a range of positions, 32 * VEC features and 4 of D (blockIdx.y)
//           attr: a warp for BATCH positions, all features in its lanes
// Traffic   terms, signs and attr (lin: once for 4 of D; attr is written once)
// Numerics  lin: acc_t over 64 edges at most, then double; nothing is added of an edge without s_k
// Limits    VEC divides C
#include "common/heads.cuh"

#define WARPS (THREADS / 32)
#define DEPTH 4     // features of edges that a lane of gatv2_lin sums at once
#define TOGETHER 4  // edges that it takes at once
#define FLUSH (64 / TOGETHER)

struct Slopes {
  const acc_t* terms;
  const unsigned char* signs;
  int heads, channels;
  acc_t slope;

  // The gradient of a position's score in the head of feature f.
  DEVICE_MEMBER acc_t of_score(long long position, int f) const {
    return __ldg(terms + position * heads + f / channels);
  }
  DEVICE_MEMBER void of_hidden(long long position, int f, acc_t s, acc_t (&to)[VEC]) const {
    const int channel = f % channels, bytes = (channels + 7) / 8;
    const unsigned char* from = signs + (position * heads + f / channels) * bytes + channel / 8;
    const unsigned bits = __ldg(from) >> channel % 8;
#pragma unroll
    for (int v = 0; v < VEC; v++) to[v] = bits >> v & 1 ? s : slope * s;
  }
};

// Where the features of a position start.
template <class T>
DEVICE T* row_of(T* edges, T* loops, const index_t* perm, long long position, long long num_edges,
                 int dim) {
  if (position >= num_edges) return loops + (position - num_edges) * dim;
  return edges + (perm ? (long long)__ldg(perm + position) : position) * dim;
}

DEVICE void flush(acc_t (&from)[DEPTH][VEC], double (&to)[DEPTH][VEC]) {
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
#pragma unroll
    for (int v = 0; v < VEC; v++) to[d][v] += from[d][v], from[d][v] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_lin(const index_t* __restrict__ perm, const scalar_t* __restrict__ attr,
              const scalar_t* __restrict__ loop_attr, const acc_t* __restrict__ terms,
              const unsigned char* __restrict__ signs, double* __restrict__ slots,
              long long num_edges, long long positions, int heads, int channels, int dim,
              double slope) {
  const int width = heads * channels, slices = (width + 32 * VEC - 1) / (32 * VEC);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int f = (blockIdx.y % slices * 32 + lane) * VEC, d0 = blockIdx.y / slices * DEPTH;
  const Slopes slopes = {terms, signs, heads, channels, (acc_t)slope};
  const long long share = (positions + gridDim.x - 1) / gridDim.x;
  const long long begin = blockIdx.x * share, end = min(begin + share, positions);
  acc_t recent[DEPTH][VEC] = {};
  double sum[DEPTH][VEC] = {};
  int batches = 0;
  for (long long k = begin + warp * TOGETHER; k < end; k += WARPS * TOGETHER) {
    acc_t s[TOGETHER], g[TOGETHER][VEC];
    const scalar_t* row[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; u++) {
      s[u] = k + u < end && f < width ? slopes.of_score(k + u, f) : 0;
      if (s[u] == 0) continue;
      row[u] = row_of(attr, loop_attr, perm, k + u, num_edges, dim) + d0;
      slopes.of_hidden(k + u, f, s[u], g[u]);
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
      for (int u = 0; u < TOGETHER; u++)
        if (d0 + d < dim && s[u] != 0) add_scaled(recent[d], widen(__ldg(row[u] + d)), g[u]);
    if (++batches % FLUSH == 0) flush(recent, sum);
  }
  flush(recent, sum);
  __shared__ double shared[THREADS][VEC];
  for (int d = 0; d < DEPTH && d0 + d < dim; d++) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      double mine = 0;
#pragma unroll
      for (int other = 0; other < DEPTH; other++) mine = other == d ? sum[other][v] : mine;
      shared[threadIdx.x][v] = mine;
    }
    __syncthreads();
    if (warp == 0 && f < width)
      for (int v = 0; v < VEC; v++) {
        double total = 0;
        for (int w = 0; w < WARPS; w++) total += shared[w * 32 + lane][v];
        slots[((long long)blockIdx.x * dim + d0 + d) * width + f + v] = total;
      }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_attr(const index_t* __restrict__ perm, const scalar_t* __restrict__ lin,
               const scalar_t* __restrict__ att, const acc_t* __restrict__ terms,
               const unsigned char* __restrict__ signs, scalar_t* __restrict__ grad_attr,
               scalar_t* __restrict__ grad_loop, long long num_edges, long long positions,
               int heads, int channels, int dim, double slope) {
  const Place place(1, heads * channels);
  const Slopes slopes = {terms, signs, heads, channels, (acc_t)slope};
  const long long first = group_of_launch() * BATCH;
  if (first >= positions) return;
  acc_t g[BATCH][NV][VEC] = {};
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = place.channel(n);
    if (!place.inside(n)) continue;
    acc_t vector[VEC];
    load(att + f, vector);
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const acc_t s = first + u < positions ? slopes.of_score(first + u, f) : 0;
      if (s == 0) continue;
      slopes.of_hidden(first + u, f, s, g[u][n]);
#pragma unroll
      for (int v = 0; v < VEC; v++) g[u][n][v] *= vector[v];
    }
  }
  for (int d = 0; d < dim; d++) {
    acc_t parts[BATCH] = {}, map[NV][VEC];
    load_row(lin, d, place, map);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++)
#pragma unroll
        for (int v = 0; v < VEC; v++) parts[u] = fma(map[n][v], g[u][n][v], parts[u]);
    combine<HEAD_LANES>(parts, place.sub, Plus());
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const long long position = first + place.own_edge(i);
      if (place.sub % SPREAD == 0 && position < positions)
        row_of(grad_attr, grad_loop, perm, position, num_edges, dim)[d] = narrow(parts[i]);
    }
  }
}
