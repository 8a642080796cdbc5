// Which edges a lane group works on: first the tiles of split rows, then the whole rows.
//
// A tile is (row, begin, end, parts): parts counts the tiles of the row on its first tile, and is
// 0 on the others. Tiles come first because they are the longest work of a launch.
#pragma once
#include "scalar.cuh"

struct Item {
  long long row, begin, end;
  long long part;  // of a tile its number, of a whole row -1
};

// False if there is nothing to do. `item` is the number of the lane group in the launch.
DEVICE bool find_item(Item& it, long long item, const index_t* rowptr, const long long* tiles,
                      long long num_rows, long long num_tiles, long long split) {
  if (item < num_tiles) {
    const long long* tile = tiles + 4 * item;
    it.row = tile[0], it.begin = tile[1], it.end = tile[2], it.part = item;
    return true;
  }
  it.row = item - num_tiles, it.part = -1;
  if (it.row >= num_rows) return false;
  it.begin = rowptr[it.row], it.end = rowptr[it.row + 1];
  return it.end - it.begin <= split;
}

DEVICE long long group_of_launch() {
  return ((long long)blockIdx.x * THREADS + threadIdx.x) / LANES;
}

// The lanes of the warp that form this lane's group.
DEVICE unsigned group_mask() {
  if (LANES == 32) return 0xffffffffu;
  return ((1u << (LANES & 31)) - 1u) << (threadIdx.x / LANES * LANES & 31);
}
