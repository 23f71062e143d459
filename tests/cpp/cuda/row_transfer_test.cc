// Transfers of libkvx in GPU memory equal those in host memory bit for bit. Bad tables move
// nothing.

#include "turbomind/backend/cuda/transfer/row_transfer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "cuda/gpu_array.h"
#include "cuda/test_stream.h"
#include "kvx/kvx_abi.h"
#include "kvx/src/jobs.h"
#include "kvx/src/transfer.h"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {
namespace {

constexpr int kCases = 300;
constexpr size_t kGuard = 16;  // bytes around every buffer

// The same bytes in host memory and in GPU memory, both `offset` bytes after an aligned address.
class Twin {
 public:
  Twin(Stream stream, std::vector<uint8_t> bytes, size_t offset = 0)
      : host_(std::move(bytes)), gpu_(stream, host_), offset_(kGuard + offset) {}

  void* Data(bool on_gpu) { return (on_gpu ? gpu_.data() : host_.data()) + offset_; }
  bool IsEqual() const { return gpu_.Read() == host_; }
  const std::vector<uint8_t>& host() const { return host_; }

 private:
  std::vector<uint8_t> host_;
  GpuArray<uint8_t> gpu_;
  size_t offset_;
};

template <class T>
std::vector<uint8_t> Bytes(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(2 * kGuard + values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(bytes.data() + kGuard, values.data(), values.size() * sizeof(T));
  }
  return bytes;
}

int64_t SizeOfType(int dtype) {
  return dtype == KVX_DTYPE_F32 ? 4 : (dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 ? 2 : 1);
}

// Random sizes, layouts, strides, dtypes, tables and rows. Descriptors are made for both memories.
class Case {
 public:
  Case(Stream stream, unsigned seed) : stream_(stream), random_(seed) {
    blocks_ = Draw(1, 5);
    block_size_ = Pick({1, 2, 3, 4, 8, 16});
    heads_ = Pick({1, 2, 3, 7});
    dim_ = Pick({1, 2, 3, 8, 16, 24, 61, 64});  // 7 heads of 61 are more than the threads
  }

  int64_t Draw(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  int64_t Pick(std::initializer_list<int64_t> choices) {
    return choices.begin()[Draw(0, static_cast<int64_t>(choices.size()) - 1)];
  }

  // Adds values around 3, or codes of FP8 that are no NaN.
  Twin& AddValues(int64_t count, int dtype) {
    const int64_t element = SizeOfType(dtype);
    std::vector<uint8_t> bytes(3 * kGuard + static_cast<size_t>(count * element));
    std::normal_distribution<float> values(0.f, 3.f);
    for (size_t i = 0; i < bytes.size() / static_cast<size_t>(element); ++i) {
      if (element == 1) {
        bytes[i] = static_cast<uint8_t>(random_() & 0xbf);
      } else {
        const DataType type = dtype == KVX_DTYPE_F32   ? DataType::kFloat32
                              : dtype == KVX_DTYPE_F16 ? DataType::kFloat16
                                                       : DataType::kBFloat16;
        StoreAs(values(random_), type, bytes.data(), static_cast<int>(i));
      }
    }
    const auto offset = static_cast<size_t>(Pick({0, 0, 2 * element, element}));
    return memory_.emplace_back(stream_, std::move(bytes), offset);
  }
  Twin& AddScales(int64_t count) {
    std::vector<float> scales;
    for (int64_t i = 0; i < count; ++i) {
      scales.push_back(0.25f * static_cast<float>(Draw(1, 9)));
    }
    return memory_.emplace_back(stream_, Bytes(scales));
  }
  // Adds integers of 32 or 64 bits.
  Twin& AddIntegers(const std::vector<int64_t>& values, kvx_dtype_t* dtype) {
    *dtype = Pick({0, 1}) == 0 ? KVX_DTYPE_S32 : KVX_DTYPE_S64;
    return *dtype == KVX_DTYPE_S64
               ? memory_.emplace_back(stream_, Bytes(values))
               : memory_.emplace_back(stream_,
                                      Bytes(std::vector<int32_t>(values.begin(), values.end())));
  }

  kvx_cache_desc_t MakeCache() {
    kvx_cache_desc_t cache = {};
    cache.size = sizeof(cache);
    cache.num_blocks = static_cast<uint32_t>(blocks_);
    cache.block_size = static_cast<uint32_t>(block_size_);
    cache.num_kv_heads = static_cast<uint32_t>(heads_);
    cache.head_dim = static_cast<uint32_t>(dim_);
    cache.k = MakeSide(cache_[0]);
    cache.v = MakeSide(cache_[1]);
    return cache;
  }

  kvx_kv_io_desc_t MakeRows(int64_t tokens, const kvx_cache_desc_t& cache, bool gathers) {
    kvx_kv_io_desc_t io = {};
    io.size = sizeof(io);
    io.num_tokens = static_cast<uint32_t>(tokens);
    io.num_kv_heads = cache.num_kv_heads;
    io.head_dim = cache.head_dim;
    for (int side = 0; side < 2; ++side) {
      kvx_tensor_desc_t& tensor = side == 0 ? io.key : io.value;
      const int dtype = side == 0 ? cache.k.dtype : cache.v.dtype;
      const bool is_fp8 = SizeOfType(dtype) == 1;
      const bool is_copy = (is_fp8 && gathers) || Pick({0, 1}) == 0;
      tensor = {};
      tensor.size = sizeof(tensor);
      tensor.dtype = static_cast<kvx_dtype_t>(
          is_copy ? dtype : Pick({KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}));
      tensor.layout = KVX_LAYOUT_BLOCK_CUSTOM;
      tensor.ndim = 3;
      const int64_t shape[] = {tokens, heads_, dim_};
      const int64_t stride[] = {heads_ * dim_, dim_, 1};
      std::copy_n(shape, 3, tensor.shape);
      std::copy_n(stride, 3, tensor.stride);
      rows_[side] = &AddValues(tokens * heads_ * dim_, tensor.dtype);
    }
    return io;
  }

  void CheckEqual() const {
    for (const Twin& twin : memory_) {
      CHECK(twin.IsEqual());
    }
  }

  Twin* cache_[2] = {};
  Twin* rows_[2] = {};
  int64_t blocks_ = 0;
  int64_t block_size_ = 0;
  int64_t heads_ = 0;
  int64_t dim_ = 0;

 private:
  kvx_tensor_desc_t MakeSide(Twin*& memory) {
    kvx_tensor_desc_t desc = {};
    desc.size = sizeof(desc);
    desc.dtype = static_cast<kvx_dtype_t>(
        Pick({KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2}));
    desc.layout =
        static_cast<kvx_layout_t>(Pick({KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                        KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM}));
    int64_t pack = Pick({1, 2, 4, 8, dim_});
    pack = dim_ % pack == 0 ? pack : 1;
    std::vector<int64_t> shape = {blocks_, block_size_, heads_, dim_};
    if (desc.layout == KVX_LAYOUT_BLOCK_HND) {
      shape = {blocks_, heads_, block_size_, dim_};
    } else if (desc.layout == KVX_LAYOUT_BLOCK_HND_PACKED) {
      shape = {blocks_, heads_, dim_ / pack, block_size_, pack};
    }
    std::vector<size_t> order(shape.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    const bool is_custom = desc.layout == KVX_LAYOUT_BLOCK_CUSTOM;
    if (is_custom) {
      std::shuffle(order.begin(), order.end(), random_);
    }
    const int64_t element = SizeOfType(desc.dtype);
    const int64_t unit = is_custom ? 1 : 16 / element;
    const bool is_padded = Pick({0, 1}) == 0;
    int64_t step = 1;
    desc.ndim = static_cast<uint32_t>(shape.size());
    for (size_t i = order.size(); i-- > 0;) {
      if (is_padded && i + 1 < order.size()) {
        step = (step + unit - 1) / unit * unit + unit * Draw(0, 2);
      }
      desc.shape[order[i]] = shape[order[i]];
      desc.stride[order[i]] = step;
      step *= shape[order[i]];
    }
    memory = &AddValues(step, desc.dtype);
    return desc;
  }

  Stream stream_;
  std::mt19937_64 random_;
  std::deque<Twin> memory_;
};

void SetMemory(kvx_tensor_desc_t& desc, Twin* twin, bool on_gpu) {
  desc.memory = on_gpu ? KVX_MEMORY_DEVICE : KVX_MEMORY_HOST;
  desc.data = twin->Data(on_gpu);
}

void SetMemory(const Case& c, kvx_cache_desc_t& cache, kvx_kv_io_desc_t& io, bool on_gpu) {
  SetMemory(cache.k, c.cache_[0], on_gpu);
  SetMemory(cache.v, c.cache_[1], on_gpu);
  SetMemory(io.key, c.rows_[0], on_gpu);
  SetMemory(io.value, c.rows_[1], on_gpu);
}

// Makes scales of one kind, or none. Returns their memory, or null.
Twin* MakeScales(Case& c, kvx_scale_desc_t& desc) {
  const int64_t kind = c.Draw(0, 4);
  const bool has_blocks = kind == KVX_SCALE_PER_BLOCK || kind == KVX_SCALE_PER_BLOCK_HEAD;
  const bool has_heads = kind == KVX_SCALE_PER_HEAD || kind == KVX_SCALE_PER_BLOCK_HEAD;
  desc = {};
  desc.size = sizeof(desc);
  desc.dtype = KVX_DTYPE_F32;
  desc.granularity = static_cast<kvx_scale_granularity_t>(kind);
  int64_t step = 1;
  const auto add = [&](int64_t size, int64_t stride) {
    desc.shape[desc.ndim] = size;
    desc.stride[desc.ndim++] = stride;
    step *= size;
  };
  if (has_blocks) {
    add(c.blocks_, has_heads ? c.heads_ : 1);
  }
  if (has_heads) {
    add(c.heads_, 1);
  }
  return kind == KVX_SCALE_NONE ? nullptr : &c.AddScales(step);
}

void RunWrite(Stream stream, Case& c) {
  kvx_cache_desc_t cache = c.MakeCache();
  const int64_t tokens = c.Draw(0, 9);
  const int64_t last = c.blocks_ * c.block_size_ - 1;
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot <= last; ++slot) {
    slots.push_back(slot);
  }
  std::mt19937 order(static_cast<unsigned>(tokens));
  std::shuffle(slots.begin(), slots.end(), order);  // distinct, as the order of writes is not fixed
  slots.resize(static_cast<size_t>(tokens), -1);
  const int64_t invalid = c.Pick({-1, 0, last});
  if (tokens > 2) {
    slots[1] = c.Pick({-1, -7, invalid});
  }
  kvx_write_desc_t write = {};
  write.size = sizeof(write);
  write.io = c.MakeRows(tokens, cache, false);
  write.slots = {sizeof(write.slots), KVX_DTYPE_S32, static_cast<uint32_t>(tokens), invalid,
                 nullptr};
  Twin& slot_memory = c.AddIntegers(slots, &write.slots.dtype);
  Twin* const scales[2] = {MakeScales(c, write.k_scale_desc), MakeScales(c, write.v_scale_desc)};
  Twin& per_tensor = c.AddScales(1);
  for (const bool on_gpu : {false, true}) {
    SetMemory(c, cache, write.io, on_gpu);
    write.slots.slots = slot_memory.Data(on_gpu);
    write.k_scale_desc.data = scales[0] == nullptr ? nullptr : scales[0]->Data(on_gpu);
    write.v_scale_desc.data = scales[1] == nullptr ? nullptr : scales[1]->Data(on_gpu);
    write.k_scale = per_tensor.Data(on_gpu);
    const kvx::Job<RowWrite> job = kvx::MakeJob(&cache, &write);
    REQUIRE(job.is_on_gpu == on_gpu);
    if (on_gpu) {
      CHECK(QueueWrite(job.rows, stream) == TransferResult::kQueued);
    } else {
      kvx::WriteOnHost(job.rows);
    }
  }
  c.CheckEqual();
}

void RunGather(Stream stream, Case& c) {
  kvx_cache_desc_t cache = c.MakeCache();
  const int64_t seqs = c.Draw(1, 3);
  const int64_t most = c.Draw(1, 3 * c.block_size_);
  std::vector<int64_t> lengths;
  for (int64_t seq = 0; seq < seqs; ++seq) {
    lengths.push_back(c.Draw(0, most + 2));
  }
  kvx_gather_desc_t gather = {};
  gather.size = sizeof(gather);
  gather.max_seq_len = static_cast<uint32_t>(most);
  gather.io = c.MakeRows(seqs * most, cache, true);
  kvx_block_table_t& table = gather.block_table;
  table.size = sizeof(table);
  table.seq_count = static_cast<uint32_t>(seqs);
  table.beam_width = 1;
  table.max_blocks_per_seq =
      static_cast<uint32_t>((most + c.block_size_ - 1) / c.block_size_ + c.Draw(0, 1));
  const bool is_ragged = c.Pick({0, 1}) == 0;
  table.format = is_ragged ? KVX_BLOCK_TABLE_RAGGED : KVX_BLOCK_TABLE_PACKED;
  std::vector<int64_t> indices;
  std::vector<int64_t> indptr = {0};
  for (int64_t seq = 0; seq < seqs; ++seq) {
    const int64_t count = is_ragged ? lengths[static_cast<size_t>(seq)] + c.Draw(0, 1)
                                    : int64_t{table.max_blocks_per_seq};
    for (int64_t i = 0; i < count; ++i) {
      indices.push_back(c.Draw(0, c.blocks_ - 1));
    }
    indptr.push_back(static_cast<int64_t>(indices.size()));
  }
  table.indices_count = static_cast<uint32_t>(indices.size());
  table.indptr_count = is_ragged ? static_cast<uint32_t>(seqs) + 1 : 0;
  gather.seq_lens = {sizeof(gather.seq_lens), KVX_DTYPE_S32, table.seq_count, nullptr};
  Twin& index_memory = c.AddIntegers(indices, &table.index_dtype);
  Twin* const indptr_memory = is_ragged ? &c.AddIntegers(indptr, &table.indptr_dtype) : nullptr;
  Twin& length_memory = c.AddIntegers(lengths, &gather.seq_lens.dtype);
  for (const bool on_gpu : {false, true}) {
    SetMemory(c, cache, gather.io, on_gpu);
    table.indices = index_memory.Data(on_gpu);
    table.indptr = is_ragged ? indptr_memory->Data(on_gpu) : nullptr;
    gather.seq_lens.lengths = length_memory.Data(on_gpu);
    const kvx::Job<RowGather> job = kvx::MakeJob(&cache, &gather);
    if (on_gpu) {
      CHECK(QueueGather(job.rows, stream) == TransferResult::kQueued);
    } else {
      kvx::GatherOnHost(job.rows);
    }
  }
  c.CheckEqual();
}

TEST_CASE("random writes and gathers on a GPU equal those on the host bit for bit") {
  const TestStream stream;
  for (unsigned seed = 0; seed < kCases; ++seed) {
    CAPTURE(seed);
    Case c(stream, seed);
    if (seed % 2 == 0) {
      RunWrite(stream, c);
    } else {
      RunGather(stream, c);
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda
