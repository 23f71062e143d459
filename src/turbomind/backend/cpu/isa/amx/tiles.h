#pragma once

// The eight AMX tile registers, each with up to 16 rows of 64 bytes.

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/tile_instructions.h"

namespace turbomind::TM_ISA {

// The memory layout of the tile configuration (palette 1).
struct TileShape {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShape) == 64);

// Returns the shape of eight full registers.
inline TileShape FullShape() {
  TileShape shape;
  for (int i = 0; i < 8; ++i) {
    shape.Set(i, 16, 64);
  }
  return shape;
}

// Configures the tile registers of this thread, filled with zeros, and releases them at the end.
class TileConfig {
 public:
  explicit TileConfig(const TileShape& shape) { LoadTileConfig(&shape); }
  ~TileConfig() { ReleaseTiles(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

}  // namespace turbomind::TM_ISA
