#pragma once

#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {

// Assign tiles of `tile_rows` rows to the sequences and return the number of tiles.
inline int SetPrefillTiles(int tile_rows, PrefillParams* params) {
  int64_t tiles = 0;
  for (int i = 0; i < params->num_sequences; ++i) {
    PrefillSequence& sequence = params->sequences[i];
    sequence.first_tile = static_cast<int>(tiles);
    tiles += CeilDiv(int64_t{sequence.num_tokens} * params->group, tile_rows);
  }
  params->num_tiles = static_cast<int>(tiles);
  return params->num_tiles;
}

}  // namespace turbomind::cuda
