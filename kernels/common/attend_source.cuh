// The gradients of scores, found from the side of the sources: one walk over the edges of each.
//
// With a the softmax and t_k = <grad[idx[k]], value[j]>, through dropout and with the gradients of
// the weights, the gradient of score k is s_k = a_k * (t_k - delta), delta = sum_l a_l t_l over the
// edges of the target: attention_delta.cu.
//
// `perm` holds the position of each edge in the rows by target. `terms` [E + L, H] get s_k, none of
// edges that are skipped. `more` [E + L, H] or null is what t has besides.
//
// An Op has Batch and
//   load<FULL>(batch, source, k)           asks for the rows of a batch
//   dots(batch, dots)                      the lane's parts of <grad, value>
//   add(batch, weights, slopes)            adds to its sums, by weights after dropout and by s_k
#pragma once
#include "edges.cuh"
#include "philox.cuh"

struct SourceTables {
  const index_t *idx, *perm;
  const acc_t *scores, *common, *more;  // common [N, H, 4]
  acc_t* terms;
};

template <class Op> struct Source {
  Op& op;
  const Edges& edges;
  const Place& place;
  const Dropout& dropout;
  const SourceTables& tables;
  position_t next[BATCH];   // positions of the lane's edges of the next batch
  index_t next_row[BATCH];  // and their targets

  DEVICE_MEMBER void fetch(position_t k) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const position_t at = k + place.own_edge(i);
      next[i] = edges.find(tables.idx, tables.perm, at);
      next_row[i] = at < edges.end ? __ldg(tables.idx + at) : edges.row;
    }
  }
  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    spread<FULL>(mine, source);
    position_t own[BATCH];
    acc_t weights[SLOTS][BATCH];
    Common common[SLOTS][OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      own[i] = next[i];
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        const bool has = exists(own[i], s);
        weights[s][i] = has ? __ldg(at(tables.scores, own[i], s)) : 0;
        common[s][i] = has ? Common::load(in_row(tables.common, next_row[i], 4 * place.heads,
                                                 4 * place.head_of(s)))
                           : Common();
      }
    }
    fetch(k + BATCH);
    typename Op::Batch rows;
    op.template load<FULL>(rows, source, k);
    acc_t slopes[SLOTS][BATCH] = {};
    op.dots(rows, slopes);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      combine<HEAD_LANES>(slopes[s], place.sub, Plus());
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const acc_t weight = exp(weights[s][i] - common[s][i].top) * common[s][i].inverse;
        const bool has = exists(own[i], s);
        weights[s][i] = weight;
#if DROPOUT
        const acc_t factor = dropout.factor(own[i], place.head_of(s));
        weights[s][i] *= factor, slopes[s][i] *= factor;
#endif
#if MORE
        slopes[s][i] += has ? __ldg(at(tables.more, own[i], s)) : 0;
#endif
        // An edge with all of the weight has no gradient, or NaN.
        const acc_t from = weight == 1 ? slopes[s][i] : common[s][i].delta;
        slopes[s][i] = has ? weight * (slopes[s][i] - from) : 0;
        if (has && place.writes(s)) *at(tables.terms, own[i], s) = slopes[s][i];
      }
    }
    op.add(rows, weights, slopes);
  }

 private:
  DEVICE_MEMBER bool exists(position_t position, int s) const {
    return position != NOWHERE && place.has(s);
  }
  template <class T, class Row> DEVICE_MEMBER T* at(T* table, Row row, int s) const {
    return in_row(table, row, place.heads, place.head_of(s));
  }
};

template <class Op>
DEVICE void attend_source(Op& op, const Edges& edges, const Place& place, const Dropout& dropout,
                          const SourceTables& tables) {
  Source<Op> step = {op, edges, place, dropout, tables};
  step.fetch(edges.begin);
  walk(edges, tables.idx, step);
}
