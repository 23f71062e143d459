#include "turbomind/backend/cpu/packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/k_quant_tiles.h"
#include "turbomind/backend/cpu/nvfp4_tiles.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/check.h"
#include "turbomind/core/float_convert.h"

namespace turbomind {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kRegionBytes = size_t{64} << 20;
constexpr int64_t kCopyBytes = 1 << 20;  // one work item
constexpr size_t kTileAlignment = 64;

uint16_t FlushSubnormal(uint16_t bf16) {
  return (bf16 & 0x7f80) == 0 ? static_cast<uint16_t>(bf16 & 0x8000) : bf16;
}

// Writes one quantized row of the source to lane `lane` of a tile.
void PackQuantRow(const MatrixSource& source, int64_t row, int lane, uint8_t* tile) {
  const MatrixFormat format = source.format;
  const uint8_t* block = SourceRow(source, row);
  const int meta_bytes = format == MatrixFormat::kQ4_1 ? 4 : 2;
  const int groups = format == MatrixFormat::kQ8_0 ? 8 : 4;
  const uint8_t flip = format == MatrixFormat::kQ8_0 ? 0x80 : 0;
  for (int64_t s = 0; s < NumSteps(format, source.cols); ++s) {
    std::memcpy(tile + 2 * lane, block, 2);
    if (meta_bytes == 4) {
      std::memcpy(tile + 32 + 2 * lane, block + 2, 2);
    }
    uint8_t* codes = tile + TileMetaBytes(format) + 4 * lane;
    for (int g = 0; g < groups; ++g) {
      for (int i = 0; i < 4; ++i) {
        codes[64 * g + i] = block[meta_bytes + 4 * g + i] ^ flip;
      }
    }
    block += SourceBlockBytes(format);
    tile += TileStepBytes(format);
  }
}

void PackBF16Row(const MatrixSource& source, int64_t row, int lane, uint8_t* tile) {
  const uint8_t* data = SourceRow(source, row);
  for (int64_t c = 0; c < source.cols; ++c) {
    uint16_t value;
    std::memcpy(&value, data + 2 * c, sizeof(value));
    value = FlushSubnormal(value);
    std::memcpy(tile + c / 2 * 64 + 4 * lane + 2 * (c % 2), &value, sizeof(value));
  }
}

// `values` is scratch: [cols] for kF32.
void PackTile(const MatrixSource& source, MatrixFormat format, int64_t index, float* values,
              uint8_t* tile) {
  const int64_t first = index * kTileRows;
  const int lanes = static_cast<int>(std::min<int64_t>(kTileRows, source.rows - first));
  for (int lane = 0; lane < lanes; ++lane) {
    if (IsQuantized(format)) {
      PackQuantRow(source, first + lane, lane, tile);
    } else if (IsKQuant(format)) {
      PackKQuantRow(source, first + lane, lane, tile);
    } else if (format == MatrixFormat::kNvfp4) {
      PackNvRow(source, first + lane, lane, tile);
    } else if (format == MatrixFormat::kBF16) {
      PackBF16Row(source, first + lane, lane, tile);
    } else {
      DequantizeMatrixRow(source, first + lane, values);
      for (int64_t c = 0; c < source.cols; ++c) {
        std::memcpy(tile + 64 * c + 4 * lane, &values[c], sizeof(float));
      }
    }
  }
}

}  // namespace

void CopyBytes(ThreadPool& pool, const void* from, int64_t num_bytes, uint8_t* to) {
  const auto* source = static_cast<const uint8_t*>(from);
  pool.ParallelFor((num_bytes + kCopyBytes - 1) / kCopyBytes, [&](int64_t item, int) {
    const int64_t begin = item * kCopyBytes;
    std::memcpy(to + begin, source + begin,
                static_cast<size_t>(std::min(kCopyBytes, num_bytes - begin)));
  });
}

constexpr size_t kMinForHugePages = size_t{16} << 20;

void* ReservePages(size_t num_bytes) {
  if (num_bytes == 0) {
    return nullptr;
  }
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  if (num_bytes >= kMinForHugePages) {
    madvise(memory, num_bytes, MADV_HUGEPAGE);  // a hint: failure costs only speed
  }
  return memory;
}

void ReleasePages(void* memory, size_t num_bytes) {
  if (memory != nullptr) {
    munmap(memory, num_bytes);
  }
}

std::shared_ptr<uint8_t> MatrixArena::Allocate(size_t num_bytes) {
  const size_t size = (num_bytes + 63) / 64 * 64;
  if (region_ == nullptr || size > region_bytes_ - used_bytes_) {
    const size_t bytes = std::max(kRegionBytes, size) + kHugePageBytes;
    auto* pages = static_cast<uint8_t*>(ReservePages(bytes));
    const std::shared_ptr<uint8_t> whole(pages, [bytes](uint8_t* p) { ReleasePages(p, bytes); });
    const size_t skip = -reinterpret_cast<uintptr_t>(pages) % kHugePageBytes;
    region_ = std::shared_ptr<uint8_t>(whole, pages + skip);
    region_bytes_ = bytes - skip;
    used_bytes_ = 0;
  }
  std::shared_ptr<uint8_t> result(region_, region_.get() + used_bytes_);
  used_bytes_ += size;
  return result;
}

CpuPackedMatrix::CpuPackedMatrix(const MatrixSource& source, bool exact, MatrixArena& arena,
                                 ThreadPool& pool) {
  CheckMatrixSource(source);
  Check(exact || !IsMxfp4(source.format),
        "MXFP4 must be converted to kF32 before it is packed into tiles");
  if (IsFp8(source.format) && !exact) {
    throw InvalidArgument("The CPU has no kernels for " + std::string(InfoOf(source.format).name) +
                          ". Convert the matrix.");
  }
  rows = source.rows;
  cols = source.cols;
  format = exact ? MatrixFormat::kF32 : source.format;
  tile_bytes_ = TileBytes(format, cols);
  if (source.packed) {
    TakePacked(source, arena, pool);
    return;
  }
  const std::shared_ptr<uint8_t> tiles = arena.Allocate(static_cast<size_t>(num_bytes()));
  const int64_t num_values = format == MatrixFormat::kF32 ? source.cols : 0;
  std::vector<float> values(static_cast<size_t>(num_values * pool.num_threads()));
  pool.ParallelFor(num_tiles(), [&](int64_t index, int worker) {
    PackTile(source, format, index, values.data() + worker * num_values,
             tiles.get() + index * tile_bytes_);
  });
  data_ = tiles.get();
  owner_ = tiles;
}

void CpuPackedMatrix::TakePacked(const MatrixSource& source, MatrixArena& arena, ThreadPool& pool) {
  if (source.format != format) {
    throw InvalidArgument("The packed matrix has rounded weights. It must be packed in FP32.");
  }
  if (source.owner != nullptr) {
    if (reinterpret_cast<uintptr_t>(source.data) % kTileAlignment != 0) {
      throw InvalidArgument("The packed matrix must be aligned to 64 bytes.");
    }
    data_ = static_cast<const uint8_t*>(source.data);
    owner_ = source.owner;
    return;
  }
  const std::shared_ptr<uint8_t> tiles = arena.Allocate(static_cast<size_t>(num_bytes()));
  CopyBytes(pool, source.data, num_bytes(), tiles.get());
  data_ = tiles.get();
  owner_ = tiles;
}

int64_t CpuMatrix::num_tiles() const { return (rows + kTileRows - 1) / kTileRows; }

void CpuPackedMatrix::ReadRow(int64_t row, float* out) const {
  const int lane = static_cast<int>(row % kTileRows);
  const uint8_t* first = tile(row / kTileRows);
  const uint8_t* codes = first + TileMetaBytes(format) + 4 * lane;
  if (format == MatrixFormat::kF32) {
    for (int64_t c = 0; c < cols; ++c) {
      out[c] = LoadAs(codes + 64 * c, DataType::kFloat32, 0);
    }
    return;
  }
  if (format == MatrixFormat::kBF16) {
    for (int64_t c = 0; c < cols; ++c) {
      out[c] = LoadAs(codes + c / 2 * 64 + 2 * (c % 2), DataType::kBFloat16, 0);
    }
    return;
  }
  if (IsKQuant(format)) {
    return ReadKQuantRow(format, first, lane, cols, out);
  }
  if (format == MatrixFormat::kNvfp4) {
    return ReadNvRow(first, lane, cols, out);
  }
  const int meta_bytes = format == MatrixFormat::kQ4_1 ? 4 : 2;
  const uint8_t* meta = first + 2 * lane;
  for (int64_t s = 0; s < NumSteps(format, cols); ++s) {
    uint8_t block[2 + kQuantBlock];  // one block in the source's layout
    std::memcpy(block, meta + s * TileStepBytes(format), 2);
    if (meta_bytes == 4) {
      std::memcpy(block + 2, meta + s * TileStepBytes(format) + 32, 2);
    }
    const bool wide = format == MatrixFormat::kQ8_0;
    for (int i = 0; i < (wide ? 32 : 16); ++i) {
      const uint8_t code = codes[s * TileStepBytes(format) + i / 4 * 64 + i % 4];
      block[meta_bytes + i] = wide ? code ^ 0x80 : code;
    }
    DequantizeBlock(format, block, out + s * kQuantBlock);
  }
}

}  // namespace turbomind
