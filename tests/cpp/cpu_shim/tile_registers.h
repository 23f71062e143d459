#pragma once

// The tile registers of AMX in memory, for each thread its own, and the instructions as Intel's
// manual defines them. What hardware answers with a fault ends the program with a message.

#include <cstdint>

namespace turbomind::cpu_shim {

// Reads the 64 bytes of a configuration. All registers become zero.
void LoadTileConfig(const void* config);
void ReleaseTiles();
// Copies the configured rows and bytes between a register and rows `stride` bytes apart. A load
// clears the rest of the register.
void LoadTile(int tile, const void* rows, int64_t stride);
void StoreTile(int tile, void* rows, int64_t stride);
void ZeroTile(int tile);

// The registers of a product C += A · B.
struct TileProduct {
  int c;
  int a;
  int b;
};
void DotBytes(TileProduct product);     // int8 times int8
void DotUnsigned(TileProduct product);  // uint8 times int8
// BF16 times BF16. The even and the odd columns have sums of their own, which start at zero and are
// added to each other, then to C. Subnormal numbers are zero.
void DotBf16(TileProduct product);

}  // namespace turbomind::cpu_shim
