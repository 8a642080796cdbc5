// The gradient of attention on the side of the targets: one walk over a row's edges.
//
// With a the softmax and t_k = <grad[i], value_k>, through dropout and with the gradients of the
// weights, the gradient of score k is s_k = a_k * (t_k - delta), delta = sum_l a_l t_l. delta is
// known at the end only, so a sum of s_k * m_k is held as two, of a_k * (t_k - c) * m_k and of
// a_k * m_k, for c the t of an edge with much of the weight: the smaller the differences, the
// less is rounded, and where one edge takes all, or equal ones share it, nothing is.
//
// `terms` [E + L, 2, H] get a_k, negative where it was dropped, and t_k; then, once delta is known,
// the weight after dropout and s_k. A batch waits in registers until the next one, so that the
// last one of a row is written once.
//
// An Op has Batch, load and score as in attend.cuh, and
//   dots(batch, scores, dots)      the lane's parts of the scores, and of <grad, value>
//   add(batch, a, at)              adds to its two sums
//   recentre(slot, by)             adds so many times its second sum to its first
//   finish(edges, shift)           writes what they make with delta - c, of a tile the sums
#pragma once
#include "edges.cuh"
#include "philox.cuh"

struct TargetTables {
  const acc_t *stats, *grad_weights;
  acc_t *terms, *partial_delta, *centre;  // the latter for each tile
};

// From weight and t to the weight after dropout and the gradient of the score.
DEVICE void settle(acc_t& a, acc_t& t, acc_t delta, acc_t keep) {
  const bool dropped = DROPOUT && a < 0, skipped = LOOPS && a == 0 && t == 0;
  t = skipped ? 0 : (dropped ? -a : a) * (t - delta);
  if (DROPOUT) a = dropped ? 0 : a * keep;
}

template <class Op> struct Target {
  Op& op;
  const Edges& edges;
  const Place& place;
  const Dropout& dropout;
  const TargetTables& tables;
  acc_t top[SLOTS], inverse[SLOTS];
  acc_t centre[SLOTS], share[SLOTS];   // t of an edge, and its weight
  acc_t shift[SLOTS], mass[SLOTS];     // the lane's sums of a * (t - centre), and of a
  acc_t a[SLOTS][BATCH], t[SLOTS][BATCH];  // of the batch at `held`
  position_t held;

  DEVICE_MEMBER void start() {
    held = edges.begin;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const bool has = edges.row >= 0 && place.has(s);
      const acc_t* stats = tables.stats + edges.row * 2ll * place.heads + place.head_of(s);
      top[s] = has ? stats[0] : 0, inverse[s] = has ? stats[place.heads] : 0;
      centre[s] = share[s] = shift[s] = mass[s] = 0;
#pragma unroll
      for (int i = 0; i < OWN; i++) a[s][i] = t[s][i] = 0;
    }
  }

  // Where the terms of a lane's edge of the batch at k are, or null.
  DEVICE_MEMBER acc_t* at(position_t k, int s, int i) const {
    const position_t edge = k + place.own_edge(i);
    if (edge >= edges.stop || !place.writes(s)) return nullptr;
    return tables.terms + edges.position(edge) * 2 * place.heads + place.head_of(s);
  }
  DEVICE_MEMBER void write() const {
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (acc_t* to = at(held, s, i)) to[0] = a[s][i], to[place.heads] = t[s][i];
  }

  // t of an edge from <grad, value>, and its softmax, negative where it is dropped.
  DEVICE_MEMBER void change(long long position, int s, acc_t& weight, acc_t& dot) const {
#if DROPOUT
    const acc_t factor = dropout.factor(position, place.head_of(s));
#else
    const acc_t factor = 1;
#endif
#if WEIGHTS
    const acc_t given = place.has(s)
                            ? tables.grad_weights[position * place.heads + place.head_of(s)]
                            : 0;
    dot = Op::AFTER_DROPOUT ? (dot + given) * factor : dot * factor + given;
#else
    dot *= factor;
#endif
    if (DROPOUT && factor == 0) weight = -weight;
  }

  // Takes as centre the t of an edge that has more than twice the weight of the one before.
  DEVICE_MEMBER void find_centre(int s, const acc_t (&weights)[BATCH], const acc_t (&dots)[BATCH]) {
    acc_t most = weights[0], value = -INF;
#pragma unroll
    for (int i = 1; i < OWN; i++) most = max(most, weights[i]);
    if (!__any_sync(ALL_LANES, most > 2 * share[s])) return;
    most = max_over_edges(most);
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (weights[i] == most) value = max(value, dots[i]);
    value = max_over_edges(value);
    const acc_t moved = most > 2 * share[s] ? centre[s] - value : 0;
    const bool moves = most > 2 * share[s] && moved - moved == 0;
    const acc_t by = moves ? moved : 0;
    if (moves) share[s] = most, centre[s] = value;
    shift[s] = fma(by, mass[s], shift[s]);
    op.recentre(s, by);
  }

  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    if (k > edges.begin) write();
    held = k;
    index_t source[BATCH];
    const unsigned used = spread<FULL>(mine, source);
    typename Op::Batch rows;
    op.template load<FULL>(rows, k, source);
    acc_t weights[SLOTS][BATCH] = {}, dots[SLOTS][BATCH] = {};
    op.dots(rows, weights, dots);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      combine<HEAD_LANES>(weights[s], place.sub, Plus());
      combine<HEAD_LANES>(dots[s], place.sub, Plus());
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int u = place.own_edge(i);
        if (FULL || used >> u & 1) {
          weights[s][i] = exp(op.score(weights[s][i]) - top[s]) * inverse[s];
          a[s][i] = weights[s][i];
          change(edges.position(k + u), s, a[s][i], dots[s][i]);
          t[s][i] = dots[s][i];
        } else {
          weights[s][i] = dots[s][i] = a[s][i] = t[s][i] = 0;
        }
      }
      find_centre(s, weights[s], dots[s]);
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        mass[s] += weights[s][i];
        dots[s][i] = FULL || used >> place.own_edge(i) & 1
                         ? weights[s][i] * (dots[s][i] - centre[s])
                         : 0;
        shift[s] += dots[s][i];
      }
    }
    op.add(rows, weights, dots);
  }

  // The batches that were written before delta was known: each number by the lane that wrote it.
  DEVICE_MEMBER void settle_written(int s, acc_t delta) const {
#pragma unroll 4
    for (position_t k = edges.begin; k < held; k += BATCH)
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (acc_t* to = at(k, s, i)) {
          acc_t weight = to[0], dot = to[place.heads];
          settle(weight, dot, delta, dropout.keep);
          if (DROPOUT) to[0] = weight;
          to[place.heads] = dot;
        }
  }

  DEVICE_MEMBER void finish() {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      shift[s] = sum_over_edges(shift[s]), mass[s] = sum_over_edges(mass[s]);
      if (edges.part >= 0) {
        const long long head = (long long)edges.part * place.heads + place.head_of(s);
        if (place.sub || !place.has(s)) continue;
        tables.partial_delta[head] = shift[s] + centre[s] * mass[s];
        tables.centre[head] = centre[s];
      } else {
        const acc_t delta = centre[s] + shift[s];
#pragma unroll
        for (int i = 0; i < OWN; i++) settle(a[s][i], t[s][i], delta, dropout.keep);
        settle_written(s, delta);
      }
    }
    write();
    if (edges.row >= 0) op.finish(edges, shift);
  }
};

// All of an item. Every lane of the warp takes part, whether its group has an item or not.
template <class Op>
DEVICE void attend_target(Op& op, const Graph& graph, const Edges& edges, const Place& place,
                          const Dropout& dropout, const TargetTables& tables) {
  Target<Op> step = {op, edges, place, dropout, tables};
  step.start();
  walk(edges, graph.idx, step);
  step.finish();
}
