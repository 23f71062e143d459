#pragma once

// ⑦ The arguments of the decode attention kernels, for one tile and H query heads.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_integer.h"
#include "turbomind/backend/cpu/isa/attention/attention_load.h"

namespace turbomind::TM_ISA {

struct ScoreArgs {
  const TileSide* keys = nullptr;
  const float* q = nullptr;        // [H, head_dim]
  const int32_t* pairs = nullptr;  // [head_dim / 2, H] from RoundQuery, for the integer kernels
  const float* qsum = nullptr;     // [H], for affine codes
  int head_dim = 0;
  float* scores = nullptr;  // [H, kTileTokens]; the integer kernels leave out the factor q_scale
};

struct ValueArgs {
  const TileSide* values = nullptr;
  const float* weights = nullptr;  // [H, kTileTokens]
  const float* old = nullptr;      // [H] factor of o
  const float* tile = nullptr;     // [H] factor of the tile's sum, for the integer kernels
  int begin = 0;                   // visible positions of the tile
  int end = 0;
  int head_dim = 0;
  float* o = nullptr;  // [H, head_dim] in the order of the layer's values
  // Scratch of the integer kernels:
  ValueScales* scales = nullptr;
  int32_t* weight_pairs = nullptr;  // [H, head_dim / 16, kTilePairs]
};

}  // namespace turbomind::TM_ISA
