// The forward pass of attention: one walk over a row's edges.
//
// An Op has a type Batch of what it holds of a batch of edges, and
//   load<FULL>(batch, k, source, used)  asks for the rows of a batch
//   scores(batch, parts)                 the lane's parts of the scores
//   score(total)                         a score from its sum over lanes
//   add(batch, change, weights)          sums = change * sums + weights * values
//   finish(row, part, factor)            writes the sums, of whole rows times the factor
//   RETRIES                              whether scores may be NaN that are not
#pragma once
#include "edges.cuh"
#include "philox.cuh"
#include "softmax.cuh"

struct Kept {
  acc_t *stats, *partial_stats, *scores;
};

template <class Op> struct Attend {
  Op& op;
  const Edges& edges;
  const Place& place;
  const Dropout& dropout;
  const Kept& kept;
  Softmax softmax[SLOTS];
  unsigned seen;  // not zero if there is an edge

  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    const unsigned used = spread<FULL>(mine, source);
    seen |= used;
    typename Op::Batch rows;
    op.template load<FULL>(rows, k, source);
    acc_t weights[SLOTS][BATCH] = {}, change[SLOTS];
    op.scores(rows, weights);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      combine<HEAD_LANES>(weights[s], place.sub, Plus());
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int u = place.own_edge(i);
        const bool exists = FULL || used >> u & 1;
        weights[s][i] = exists ? op.score(weights[s][i]) : -INF;
#if KEEP
        acc_t* to = number_at(kept.scores, edges.position(k + u), place, s);
        if (exists && place.writes(s)) *to = weights[s][i];
#endif
      }
      change[s] = softmax[s].add(weights[s]);
#if DROPOUT
#pragma unroll
      for (int i = 0; i < OWN; i++)
        weights[s][i] *=
            dropout.factor(edges.position(k + place.own_edge(i)), place.head_of(s));
#endif
    }
    op.add(rows, change, weights);
  }
};

// Returns whether it is done: not if an Op that RETRIES gave a score that is NaN.
template <class Op>
DEVICE bool attend(Op& op, const Graph& graph, const Edges& edges, const Place& place,
                   const Dropout& dropout, const Kept& kept) {
  Attend<Op> step = {op, edges, place, dropout, kept};
#pragma unroll
  for (int s = 0; s < SLOTS; s++) step.softmax[s].clear();
  step.seen = 0;
  walk(edges, graph.idx, step);
  if (Op::RETRIES) {
    bool broken = false;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) broken |= step.softmax[s].total != step.softmax[s].total;
    if (__any_sync(ALL_LANES, broken)) return false;
  }
  const bool whole = edges.part < 0;
  acc_t factor[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    acc_t top = step.softmax[s].top, total = sum_over_edges(step.softmax[s].total);
    if (whole) {
      total = step.seen ? inverse_of(top, total) : 0;
      top = step.seen ? top : 0;
    } else if (step.seen && top == -INF && total == 0) {
      total = 1;
    }
    factor[s] = whole ? total : 1;
    if (edges.row < 0 || place.sub || !place.has(s)) continue;
    acc_t* stats = whole ? kept.stats + edges.row * 2ll * place.heads
                         : kept.partial_stats + edges.part * 2ll * place.heads;
    stats[place.head_of(s)] = top, stats[place.heads + place.head_of(s)] = total;
  }
  if (edges.row >= 0) op.finish(edges.row, edges.part, factor);
  return true;
}
