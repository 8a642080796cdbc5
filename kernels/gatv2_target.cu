// gatv2_delta, gatv2_target — the gradients of x_r and of the scores.
// Maths     grad_x_r[i] = att * g, g = sum_k s_k * leaky'(z[k]), s_k as in attend_target.cuh
//           the gradient of att gets sum_i x_r[i] * g; delta: the part of each tile in delta
// Shapes    as in gatv2.cu; grad_weights [E + L, H] (acc_t) or null  terms [E + L, H] (acc_t): from
//           attention_values; s_k in the end  signs [E + L, H * ceil(C / 8)] bytes (signs.cuh)
//           delta [N, H], of split rows  slots [blocks, H*C] (double)  partial for each tile
// Mapping   as in gatv2.cu, items in turns
// Traffic   signs, scores and terms of each edge, in order, and s_k out; x_r and grad_x_r once
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#define EDGES 0
#include "common/attend_target.cuh"
#include "common/signed_sums.cuh"
#include "common/slots.cuh"

// Weights are handed out after dropout.
#define AFTER true

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_delta(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                const long long* __restrict__ tiles, const acc_t* __restrict__ scores,
                const acc_t* __restrict__ stats, const acc_t* __restrict__ grad_weights,
                const long long* __restrict__ seed, acc_t* terms,
                acc_t* __restrict__ partial_delta, long long num_rows, long long num_tiles,
                long long split, long long num_loops, int heads, int channels,
                long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const long long item = group_of_launch();
  const Edges edges(graph, item < num_tiles ? item : num_tiles + num_rows);
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  Target target = {edges, place, dropout, {scores, stats, grad_weights, nullptr, terms}, idx};
  const NoMore none = {};
  sum_tile<AFTER>(target, partial_delta, none);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const long long* __restrict__ tiles, const acc_t* __restrict__ scores,
                 const acc_t* __restrict__ stats, const acc_t* __restrict__ grad_weights,
                 const acc_t* __restrict__ delta, const unsigned char* __restrict__ signs,
                 const scalar_t* __restrict__ x_r, const scalar_t* __restrict__ att,
                 const long long* __restrict__ seed, acc_t* terms,
                 scalar_t* __restrict__ grad_x_r, double* __restrict__ slots,
                 acc_t* __restrict__ partial, long long num_rows, long long num_tiles,
                 long long split, long long num_loops, int heads, int channels, double slope,
                 long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    Target target = {edges, place, dropout, {scores, stats, grad_weights, delta, terms}, idx};
    target.start();
    target.sum<AFTER>(edges.part < 0, NoMore());
    acc_t deltas[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) deltas[s] = target.delta(s);
    RisingSums sums;
    sums.clear();
    for (position_t k = edges.begin; any_group(k < edges.stop); k += BATCH) {
      position_t own[BATCH], positions[BATCH];
      acc_t slopes[SLOTS][BATCH];
      target.slopes<false>(k, deltas, slopes, own);
      find_words(edges, idx, nullptr, k, place, own, positions);
      SignWords words;
      words.load(signs, positions, place);
      sums.add(slopes, LaneSigns(words, place));
    }
    sums.finish();
    if (edges.row < 0) continue;
    acc_t vector[NV][VEC], x[NV][VEC];
    load_row(att, 0, place, vector);
    load_row(x_r, edges.row, place, x);
    // Since sum_k s_k = 0, sum_k s_k * leaky'(z[k]) is (1 - slope) times the sum where z is positive.
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) {
        const acc_t all = sums.all[n / HEAD_VECS];
        sums.rise[n][v] = (1 - (acc_t)slope) * sums.rise[n][v] + (all - all);  // NaN, or nothing
        vector[n][v] *= sums.rise[n][v];
      }
    att_sums.add(x, sums.rise);
    store_sums(grad_x_r, partial, edges, place, vector);
  }
  att_sums.store(slots, place);
}
