#include "cpu_shim/tile_registers.h"

#include <cstring>

#include "cpu_shim/dot.h"
#include "cpu_shim/registers.h"

namespace turbomind::cpu_shim {
namespace {

constexpr int kTiles = 8;
constexpr int kRows = 16;
constexpr int kRowBytes = 64;

struct Tile {
  int rows = 0;
  int bytes = 0;  // of a row
  uint8_t data[kRows][kRowBytes] = {};
};

struct Registers {
  bool configured = false;
  Tile tiles[kTiles];
};

thread_local Registers registers;

Tile& At(int tile) {
  Require(registers.configured, "a tile is used without a configuration");
  Require(0 <= tile && tile < kTiles, "there are eight tiles");
  Tile& found = registers.tiles[tile];
  Require(found.rows > 0, "the tile is not configured");
  return found;
}

template <class T>
T Read(const Tile& tile, int row, int column) {
  T value;
  std::memcpy(&value, tile.data[row] + column * sizeof(T), sizeof(T));
  return value;
}

// A row of C.
template <class T>
struct Sums {
  T of[kRowBytes / 4] = {};
};

// Calls fn(tile a, tile b, row, sums) for every row of C after the checks of a product. The columns
// past the end of B are zero, and so are their sums.
template <class T, class Fn>
void Multiply(TileProduct product, const Fn& fn) {
  Tile& c = At(product.c);
  const Tile& a = At(product.a);
  const Tile& b = At(product.b);
  Require(product.c != product.a && product.c != product.b && product.a != product.b,
          "the tiles of a product must differ");
  Require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows,
          "the shapes of the tiles of a product do not match");
  for (int m = 0; m < c.rows; ++m) {
    Sums<T> sums;
    std::memcpy(&sums, c.data[m], sizeof(sums));
    fn(a, b, m, sums);
    std::memcpy(c.data[m], &sums, static_cast<size_t>(c.bytes));
  }
}

template <class A>
void MultiplyBytes(TileProduct product) {
  Multiply<uint32_t>(product, [](const Tile& a, const Tile& b, int m, Sums<uint32_t>& sums) {
    for (int k = 0; k < a.bytes; ++k) {
      for (int n = 0; n < kRowBytes / 4; ++n) {
        sums.of[n] +=
            static_cast<uint32_t>(Read<A>(a, m, k) * Read<int8_t>(b, k / 4, 4 * n + k % 4));
      }
    }
  });
}

}  // namespace

void LoadTileConfig(const void* config) {
  uint8_t bytes[64];
  std::memcpy(bytes, config, sizeof(bytes));
  Require(bytes[0] == 1, "the palette must be 1");
  Require(bytes[1] == 0, "the stand-in starts at row 0");
  registers = Registers();
  registers.configured = true;
  for (int i = 2; i < 16; ++i) {
    Require(bytes[i] == 0, "the reserved bytes of a tile configuration must be zero");
  }
  for (int i = 0; i < 16; ++i) {
    const int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    const int rows = bytes[48 + i];
    Require(rows <= kRows && row_bytes <= kRowBytes && row_bytes % 4 == 0 &&
                (rows == 0) == (row_bytes == 0) && (i < kTiles || rows == 0),
            "the shape of a tile is out of range");
    if (i < kTiles) {
      registers.tiles[i].rows = rows;
      registers.tiles[i].bytes = row_bytes;
    }
  }
}

void ReleaseTiles() { registers = Registers(); }

void ZeroTile(int tile) { std::memset(At(tile).data, 0, sizeof(Tile::data)); }

void LoadTile(int tile, const void* rows, int64_t stride) {
  Tile& to = At(tile);
  ZeroTile(tile);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const uint8_t*>(rows) + row * stride,
                static_cast<size_t>(to.bytes));
  }
}

void StoreTile(int tile, void* rows, int64_t stride) {
  const Tile& from = At(tile);
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(rows) + row * stride, from.data[row],
                static_cast<size_t>(from.bytes));
  }
}

void DotBytes(TileProduct product) { MultiplyBytes<int8_t>(product); }
void DotUnsigned(TileProduct product) { MultiplyBytes<uint8_t>(product); }

void DotBf16(TileProduct product) {
  constexpr int kColumns = kRowBytes / 4;
  float y[kRowBytes / 2][kColumns];  // B, of which each value is converted once
  for (int k = 0; k < 2 * At(product.b).rows; ++k) {
    for (int n = 0; n < kColumns; ++n) {
      y[k][n] = FromBf16(Read<uint16_t>(At(product.b), k / 2, 2 * n + k % 2));
    }
  }
  Multiply<float>(product, [&](const Tile& a, const Tile& /*b*/, int m, Sums<float>& sums) {
    Sums<float> part[2];
    for (int k = 0; k < a.bytes / 2; ++k) {
      const float x = FromBf16(Read<uint16_t>(a, m, k));
      for (int n = 0; n < kColumns; ++n) {
        part[k % 2].of[n] = FlushingFma(x, y[k][n], part[k % 2].of[n]);
      }
    }
    for (int n = 0; n < kColumns; ++n) {
      sums.of[n] = Flush(Flush(sums.of[n]) + Flush(part[0].of[n] + part[1].of[n]));
    }
  });
}

}  // namespace turbomind::cpu_shim
