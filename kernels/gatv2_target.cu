// gatv2_target — the gradient of x_r.
// Maths     grad_x_r[i] = att * g, g = sum_k s_k * leaky'(z[k])
//           the gradient of att gets sum_i x_r[i] * g
// Shapes    as in gatv2.cu; terms [E + L, H] (acc_t): s_k, from gatv2_source; those of edges that are
//           skipped get zero  slots [blocks, H*C] (double)  partial [T, H*C] (acc_t)
// Mapping   as in gatv2.cu, items in turns
// Traffic   signs and terms of each edge, in order; x_r and grad_x_r once
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#include "common/signs.cuh"
#include "common/slots.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const long long* __restrict__ tiles, const unsigned char* __restrict__ signs,
                 const scalar_t* __restrict__ x_r, const scalar_t* __restrict__ att, acc_t* terms,
                 scalar_t* __restrict__ grad_x_r, double* __restrict__ slots,
                 acc_t* __restrict__ partial, long long num_rows, long long num_tiles,
                 long long split, long long num_loops, int heads, int channels, double slope) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    SignedSums sums;
    sums.clear();
    for (position_t k = edges.begin; any_group(k < edges.stop); k += BATCH) {
      position_t positions[BATCH];
#pragma unroll
      for (int i = 0; i < WORD_OWN; i++)
        positions[i] = edges.find(idx, nullptr, k + word_edge(i, place));
      SignWords words;
      words.load(signs, positions, place);
      acc_t slopes[SLOTS][BATCH];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const position_t edge = k + place.own_edge(i), found = edges.find(idx, nullptr, edge);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
          const bool exists = found != NOWHERE && place.has(s);
          slopes[s][i] = exists ? *in_row(terms, found, heads, place.head_of(s)) : 0;
          if (LOOPS && !exists && edge < edges.end && place.writes(s))
            *in_row(terms, edge, heads, place.head_of(s)) = 0;
        }
      }
      sums.add(slopes, words, place);
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
    if (edges.part >= 0)
      store_partial(partial, edges.part, place, vector);
    else
      store_row(grad_x_r, edges.row, place, vector);
  }
  att_sums.store(slots, place);
}
