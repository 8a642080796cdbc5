// The gradient of attention on the side of the sources: one walk over the edges of each source.
//
// `perm` holds the position of each edge in the rows by target, `terms` [E + L, 2, H] for each
// position its weight after dropout and the gradient of its score.
//
// An Op has Batch and
//   load<FULL>(batch, source, place)       asks for the rows of a batch; place: of the lane's edges
//   add(batch, weights, slopes)            adds to its sums
#pragma once
#include "edges.cuh"

template <class Op> struct Source {
  Op& op;
  const Edges& edges;
  const Place& place;
  const index_t* perm;
  const acc_t* terms;
  position_t next[BATCH];  // positions of the lane's edges of the next batch

  DEVICE_MEMBER void fetch(position_t k) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const position_t at = k + place.own_edge(i);
      next[i] = at >= edges.end ? edges.loop : perm ? (position_t)__ldg(perm + at) : at;
    }
  }
  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    const unsigned used = spread<FULL>(mine, source);
    position_t own[BATCH];
#pragma unroll
    for (int i = 0; i < OWN; i++) own[i] = next[i];
    fetch(k + BATCH);
    acc_t weights[SLOTS][BATCH], slopes[SLOTS][BATCH];
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const bool exists = (FULL || used >> place.own_edge(i) & 1) && place.has(s);
        const acc_t* at = terms + (long long)own[i] * 2 * place.heads + place.head_of(s);
        weights[s][i] = exists ? __ldg(at) : 0;
        slopes[s][i] = exists ? __ldg(at + place.heads) : 0;
      }
    typename Op::Batch rows;
    op.template load<FULL>(rows, source, own);
    op.add(rows, weights, slopes);
  }
};

template <class Op>
DEVICE void attend_source(Op& op, const Graph& graph, const Edges& edges, const Place& place,
                          const index_t* perm, const acc_t* terms) {
  Source<Op> step = {op, edges, place, perm, terms};
  step.fetch(edges.begin);
  walk(edges, graph.idx, step);
}
