// The gradients of the scores of a row, by its target: two walks over numbers of its edges.
//
// With a the softmax and t_k = <grad[i], value_k>, through dropout and with the gradients of the
// weights, the gradient of score k is s_k = a_k * (t_k - delta), delta = sum_l a_l t_l. delta is
// summed as c + sum_l a_l (t_l - c), for c the t of an edge with much of the weight: the smaller
// the differences, the less is rounded, and where one edge of a whole row takes all, or equal ones
// share it, nothing is. Tiles of a split row add c times their weight.
//
// `terms` [E + L, H] hold <grad[i], value_k> at first, t_k once delta is known, s_k in the end; of
// edges that are skipped zero.
#pragma once
#include "edges.cuh"
#include "philox.cuh"

struct TargetTables {
  const acc_t *scores, *stats, *grad_weights;
  const acc_t* delta;  // [N, H], of split rows
  acc_t* terms;
};

struct Target {
  enum { CHANGES = DROPOUT || WEIGHTS || EDGES };  // whether t differs from what `terms` hold
  const Edges& edges;
  const Place& place;
  const Dropout& dropout;
  const TargetTables& tables;
  const index_t* idx;
  acc_t top[SLOTS], inverse[SLOTS];
  acc_t centre[SLOTS], share[SLOTS];  // t of an edge, and its weight
  acc_t shift[SLOTS], mass[SLOTS];    // the lane's sums of a * (t - centre), and of a

  DEVICE_MEMBER void start() {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const bool has = edges.row >= 0 && place.has(s);
      const acc_t* stats = in_row(tables.stats, edges.row, 2 * place.heads, place.head_of(s));
      top[s] = has ? __ldg(stats) : 0, inverse[s] = has ? __ldg(stats + place.heads) : 0;
      centre[s] = share[s] = shift[s] = mass[s] = 0;
    }
  }

  DEVICE_MEMBER acc_t weight(position_t position, bool has, int s) const {
    const acc_t* score = number_at(tables.scores, position, place, s);
    const acc_t found = exp((has ? __ldg(score) : 0) - top[s]) * inverse[s];
    return has ? found : 0;
  }

  // t of an edge from <grad, value>.
  template <bool AFTER_DROPOUT> DEVICE_MEMBER acc_t change(position_t position, int s, acc_t t) const {
#if DROPOUT
    const acc_t factor = dropout.factor(position, place.head_of(s));
#else
    const acc_t factor = 1;
#endif
#if WEIGHTS
    const acc_t given = *number_at(tables.grad_weights, position, place, s);
    return AFTER_DROPOUT ? (t + given) * factor : t * factor + given;
#else
    return t * factor;
#endif
  }

  // Takes as centre the t of an edge that has more than twice the weight of the one before.
  DEVICE_MEMBER void find_centre(int s, const acc_t (&weights)[BATCH], const acc_t (&t)[BATCH]) {
    acc_t most = weights[0], value = -INF;
#pragma unroll
    for (int i = 1; i < OWN; i++) most = max(most, weights[i]);
    if (!__any_sync(ALL_LANES, most > 2 * share[s])) return;
    most = max_over_edges(most);
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (weights[i] == most) value = max(value, t[i]);
    value = max_over_edges(value);
    const acc_t moved = most > 2 * share[s] ? centre[s] - value : 0;
    if (most > 2 * share[s] && moved - moved == 0) {
      shift[s] = fma(moved, mass[s], shift[s]);
      share[s] = most, centre[s] = value;
    }
  }

  // Forms t, and sums what delta is made of: of all edges, or of none. `more(k, parts)` adds the
  // lane's parts of what t has besides what `terms` hold.
  template <bool AFTER_DROPOUT, class More> DEVICE_MEMBER void sum(bool takes, const More& more) {
    const position_t stop = hidden(takes ? edges.stop : edges.begin);
    for (position_t k = edges.begin; any_group(k < stop); k += BATCH) {
      acc_t parts[SLOTS][BATCH] = {};
      more(k, parts);
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        if (EDGES) combine<HEAD_LANES>(parts[s], place.sub, Plus());
        position_t own[BATCH];
        bool has[BATCH];
        acc_t weights[BATCH], t[BATCH];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          const position_t edge = k + place.own_edge(i);
          own[i] = edges.position(edge);
          has[i] = edge < stop && edges.takes(idx, edge) && place.has(s);
          weights[i] = weight(own[i], has[i], s), t[i] = term(own[i], has[i], s);
          if (CHANGES && has[i]) t[i] = change<AFTER_DROPOUT>(own[i], s, t[i] + parts[s][i]);
        }
        if (CHANGES) put(own, has, s, t);
        find_centre(s, weights, t);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          mass[s] += weights[i];
          shift[s] += weights[i] * (t[i] - centre[s]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
      shift[s] = sum_over_edges(shift[s]), mass[s] = sum_over_edges(mass[s]);
    __syncwarp();
  }

  // delta of a whole row once it is summed, else as it was found before.
  DEVICE_MEMBER acc_t delta(int s) const {
    if (edges.part < 0) return centre[s] + shift[s];
    return place.has(s) ? __ldg(in_row(tables.delta, edges.row, place.heads, place.head_of(s))) : 0;
  }

  // Turns t of the lane's edges of the batch at k into s; also gives their positions.
  template <bool FULL>
  DEVICE_MEMBER void slopes(position_t k, const acc_t (&deltas)[SLOTS], acc_t (&to)[SLOTS][BATCH],
                            position_t (&own)[BATCH]) const {
    bool exists[BATCH], taken[BATCH];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const position_t edge = k + place.own_edge(i);
      exists[i] = FULL || edge < edges.stop, taken[i] = exists[i] && edges.takes(idx, edge);
      own[i] = edges.position(edge);
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      bool writes[BATCH];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const bool has = taken[i] && place.has(s);
        const acc_t slope = weight(own[i], has, s) * (term(own[i], has, s) - deltas[s]);
        to[s][i] = has ? slope : 0;
        writes[i] = exists[i] && place.has(s);
      }
      put(own, writes, s, to[s]);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!taken[i]) own[i] = NOWHERE;
  }

 private:
  DEVICE_MEMBER acc_t term(position_t position, bool has, int s) const {
    const acc_t* at = number_at(tables.terms, position, place, s);
    return has ? *at : 0;
  }
  // Writes numbers of edges once all lanes have read those before.
  DEVICE_MEMBER void put(const position_t (&own)[BATCH], const bool (&has)[BATCH], int s,
                         const acc_t (&values)[BATCH]) const {
    if (SPREAD > 1) __syncwarp();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      acc_t* to = number_at(tables.terms, own[i], place, s);
      if (has[i] && place.writes(s)) *to = values[i];
    }
  }
};

// The part of delta that a tile of a split row has.
template <bool AFTER_DROPOUT, class More>
DEVICE void sum_tile(Target& target, acc_t* partial_delta, const More& more) {
  target.start();
  target.sum<AFTER_DROPOUT>(target.edges.part >= 0, more);
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    if (target.edges.part < 0 || target.place.sub || !target.place.has(s)) continue;
    *in_row(partial_delta, target.edges.part, target.place.heads, target.place.head_of(s)) =
        target.shift[s] + target.centre[s] * target.mass[s];
  }
}

struct NoMore {
  DEVICE_MEMBER void operator()(position_t, acc_t (&)[SLOTS][BATCH]) const {}
};
