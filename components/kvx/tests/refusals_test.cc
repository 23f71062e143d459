// Tests of errors: every one has its status, and nothing changes. Descriptors with random fields
// never make a call leave its memory.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "kvx/kvx_turbomind.h"
#include "kvx/src/status.h"
#include "kvx/tests/kvx_fixture.h"

namespace kvx {
namespace {

struct Case {
  const char* name;
  kvx_status_t status;
  std::function<void(Fixture&)> change;
};

constexpr kvx_status_t kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr kvx_status_t kUnsupported = KVX_STATUS_UNSUPPORTED;
constexpr kvx_status_t kOutside = KVX_STATUS_OUT_OF_RANGE;

template <class Enum>
void SetRaw(Enum& field, int value) {
  std::memcpy(&field, &value, sizeof(field));
}

void UseOffsets(Fixture& f, uint32_t flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX) {
  f.table.assign(2 * f.table.size(), 1);
  f.gather.block_table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  f.gather.block_table.indices = f.table.data();
  f.gather.block_table.indices_count = static_cast<uint32_t>(f.table.size());
  f.gather.block_table.flags = flags;
  f.cache.pool = {sizeof(f.cache.pool), KVX_MEMORY_HOST, 2 * 4 * 2 * 16, f.k.data(), nullptr};
}

void UseMemory(Fixture& f, kvx_kv_io_desc_t& io, kvx_memory_type_t memory) {
  f.cache.k.memory = f.cache.v.memory = memory;
  io.key.memory = io.value.memory = memory;
}

const Case kOfWrite[] = {
    {"size", kInvalid, [](Fixture& f) { f.write.size -= 1; }},
    {"size of io", kInvalid, [](Fixture& f) { f.write.io.size -= 1; }},
    {"size of a tensor", kInvalid, [](Fixture& f) { f.write.io.value.size -= 1; }},
    {"size of slots", kInvalid, [](Fixture& f) { f.write.slots.size -= 1; }},
    {"size of scales", kInvalid, [](Fixture& f) { f.write.k_scale_desc.size = 8; }},
    {"size of the pool", kInvalid, [](Fixture& f) { f.cache.pool.size = 8; }},
    {"heads", kInvalid, [](Fixture& f) { f.write.io.num_kv_heads = 1; }},
    {"head_dim", kInvalid, [](Fixture& f) { f.write.io.head_dim = 8; }},
    {"tokens", kInvalid, [](Fixture& f) { f.write.io.num_tokens -= 1; }},
    {"tokens of slots", kInvalid, [](Fixture& f) { f.write.slots.token_count -= 1; }},
    {"no slots", kInvalid, [](Fixture& f) { f.write.slots.slots = nullptr; }},
    {"no rows", kInvalid, [](Fixture& f) { f.write.io.key.data = nullptr; }},
    {"no cache memory", kInvalid, [](Fixture& f) { f.cache.v.data = nullptr; }},
    {"dtype of slots", kInvalid, [](Fixture& f) { f.write.slots.dtype = KVX_DTYPE_U32; }},
    {"dtype of rows", kInvalid, [](Fixture& f) { SetRaw(f.write.io.key.dtype, 77); }},
    {"dtype of the cache", kInvalid, [](Fixture& f) { f.cache.k.dtype = KVX_DTYPE_S32; }},
    {"layout", kInvalid, [](Fixture& f) { SetRaw(f.cache.k.layout, -5); }},
    {"memory", kInvalid, [](Fixture& f) { SetRaw(f.cache.k.memory, 4); }},
    {"four dimensions", kInvalid, [](Fixture& f) { f.write.io.key.ndim = 4; }},
    {"shape", kInvalid, [](Fixture& f) { f.cache.v.shape[2] += 1; }},
    {"huge shape", kInvalid,
     [](Fixture& f) { f.write.io.key.stride[1] = f.cache.k.stride[0] = INT64_MAX; }},
    {"strides of rows", kUnsupported, [](Fixture& f) { f.write.io.key.stride[0] += 4; }},
    {"strides that do not nest", kUnsupported, [](Fixture& f) { f.cache.k.stride[2] = 8; }},
    {"negative stride", kUnsupported, [](Fixture& f) { f.cache.k.stride[1] = -64; }},
    {"device memory", kUnsupported, [](Fixture& f) { f.cache.k.memory = KVX_MEMORY_DEVICE; }},
    {"unified rows", kUnsupported, [](Fixture& f) { f.write.io.key.memory = KVX_MEMORY_UNIFIED; }},
    {"unknown memory", kUnsupported,
     [](Fixture& f) { UseMemory(f, f.write.io, KVX_MEMORY_UNKNOWN); }},
    {"device memory without a CUDA library", kUnsupported,
     [](Fixture& f) { UseMemory(f, f.write.io, KVX_MEMORY_DEVICE); }},
    {"alignment", kUnsupported,
     [](Fixture& f) { f.cache.k.data = static_cast<char*>(f.cache.k.data) + 1; }},
    {"FP8 rows", kUnsupported, [](Fixture& f) { f.write.io.key.dtype = KVX_DTYPE_F8_E4M3; }},
    {"slot", kOutside, [](Fixture& f) { f.slots.back() = 20; }},
    {"huge slot", kOutside, [](Fixture& f) { f.slots.back() = INT64_MAX; }},
    {"scale of 0", kInvalid,
     [](Fixture& f) {
       static const float zero = 0;
       f.cache.k.dtype = KVX_DTYPE_F8_E4M3;
       f.write.k_scale = &zero;
     }},
};

const Case kOfGather[] = {
    {"size", kInvalid, [](Fixture& f) { f.gather.size -= 1; }},
    {"size of the table", kInvalid, [](Fixture& f) { f.gather.block_table.size -= 1; }},
    {"size of lengths", kInvalid, [](Fixture& f) { f.gather.seq_lens.size -= 1; }},
    {"max_seq_len", kInvalid, [](Fixture& f) { f.gather.max_seq_len = 0; }},
    {"tokens", kInvalid, [](Fixture& f) { f.gather.io.num_tokens += 1; }},
    {"sequences", kInvalid, [](Fixture& f) { f.gather.seq_lens.seq_count = 1; }},
    {"indices", kInvalid, [](Fixture& f) { f.gather.block_table.indices_count += 1; }},
    {"no indices", kInvalid, [](Fixture& f) { f.gather.block_table.indices = nullptr; }},
    {"no lengths", kInvalid, [](Fixture& f) { f.gather.seq_lens.lengths = nullptr; }},
    {"format", kInvalid, [](Fixture& f) { SetRaw(f.gather.block_table.format, 9); }},
    {"flags", kInvalid, [](Fixture& f) { f.gather.block_table.flags = 2; }},
    {"indptr", kInvalid, [](Fixture& f) { f.gather.block_table.indptr = f.table.data(); }},
    {"block", kOutside, [](Fixture& f) { f.table.back() = 5; }},
    {"negative block", kOutside, [](Fixture& f) { f.table.back() = -1; }},
    {"length", kOutside, [](Fixture& f) { f.lengths.back() = -1; }},
    {"length beyond the table", kOutside,
     [](Fixture& f) {
       f.gather.block_table.max_blocks_per_seq = 1;
       f.gather.block_table.indices_count = 2;
     }},
    {"device memory of the cache alone", kUnsupported,
     [](Fixture& f) { f.cache.k.memory = f.cache.v.memory = KVX_MEMORY_DEVICE; }},
    {"device memory without a CUDA library", kUnsupported,
     [](Fixture& f) { UseMemory(f, f.gather.io, KVX_MEMORY_DEVICE); }},
    {"unified memory without a CUDA library", kUnsupported,
     [](Fixture& f) { UseMemory(f, f.gather.io, KVX_MEMORY_UNIFIED); }},
    {"FP8 cache", kUnsupported, [](Fixture& f) { f.cache.v.dtype = KVX_DTYPE_F8_E5M2; }},
    {"dtype of indices", kInvalid,
     [](Fixture& f) { f.gather.block_table.index_dtype = KVX_DTYPE_U32; }},
    {"dtype of lengths", kInvalid, [](Fixture& f) { f.gather.seq_lens.dtype = KVX_DTYPE_F32; }},
    {"block_size that is no power of two", kInvalid,
     [](Fixture& f) {
       UseOffsets(f);
       f.cache.block_size = 3;
       f.cache.k.shape[2] = f.cache.v.shape[2] = 3;
       f.gather.block_table.max_blocks_per_seq = 2;
     }},
    {"no flag", kInvalid, [](Fixture& f) { UseOffsets(f, KVX_BLOCK_TABLE_FLAG_NONE); }},
    {"no pool", kInvalid,
     [](Fixture& f) {
       UseOffsets(f);
       f.cache.pool.size = 0;
     }},
    {"small pool blocks", kInvalid,
     [](Fixture& f) {
       UseOffsets(f);
       f.cache.pool.bytes_per_block -= 2;
     }},
    {"no secondary pool", kInvalid,
     [](Fixture& f) {
       UseOffsets(f);
       f.table.front() = INT32_MIN;
     }},
    {"beams", kUnsupported,
     [](Fixture& f) {
       UseOffsets(f);
       f.gather.block_table.beam_width = 2;
       f.gather.block_table.indices_count *= 2;
     }},
    {"pool index", kOutside,
     [](Fixture& f) {
       UseOffsets(f);
       f.table.back() = 5;
     }},
};

TEST_CASE("an error of a write has its status and changes nothing") {
  setenv("LMDEPLOY_CUDA_LIBRARY", "/no/library", 1);
  CHECK(kvx_write_kv(nullptr, nullptr, nullptr) == kInvalid);
  for (const Case& c : kOfWrite) {
    CAPTURE(std::string(c.name));
    Fixture f;
    c.change(f);
    const auto before = f.Bytes();
    CHECK(kvx_write_kv(&f.cache, &f.write, nullptr) == c.status);
    CHECK(f.Bytes() == before);
  }
}

TEST_CASE("an error of a gather has its status and changes nothing") {
  setenv("LMDEPLOY_CUDA_LIBRARY", "/no/library", 1);
  for (const Case& c : kOfGather) {
    CAPTURE(std::string(c.name));
    Fixture f;
    c.change(f);
    const auto before = f.Bytes();
    CHECK(kvx_gather_kv(&f.cache, &f.gather, nullptr) == c.status);
    CHECK(f.Bytes() == before);
  }
}

// Returns whether a cache tensor lies in its memory.
bool IsInside(const kvx_tensor_desc_t& tensor, size_t size) {
  unsigned __int128 last = 0;
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    last += static_cast<unsigned __int128>(tensor.shape[i] - 1) * tensor.stride[i];
  }
  return (last + 1) * static_cast<unsigned>(BytesOf(tensor.dtype)) <= size;
}

// Writes a random value into a random 32-bit word of a descriptor, but not into a pointer.
template <class Struct>
void Mutate(Struct& desc, std::mt19937& random) {
  static const uint32_t kValues[] = {
      0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 32, 127, 128, 255, 1u << 20, INT32_MAX, 1u << 31, UINT32_MAX};
  Struct changed = desc;
  const size_t word = random() % (sizeof(desc) / 4);
  const uint32_t value = kValues[random() % std::size(kValues)];
  std::memcpy(reinterpret_cast<char*>(&changed) + 4 * word, &value, 4);
  desc = changed;
}

void RestorePointers(const Fixture& f, kvx_cache_desc_t& cache, kvx_write_desc_t& write,
                     kvx_gather_desc_t& gather) {
  const auto keep = [](auto& pointer, auto* right) {
    pointer = pointer == nullptr ? nullptr : right;
  };
  keep(cache.k.data, f.cache.k.data);
  keep(cache.v.data, f.cache.v.data);
  cache.pool.primary = f.cache.k.data;
  cache.pool.secondary = nullptr;
  for (kvx_kv_io_desc_t* io : {&write.io, &gather.io}) {
    keep(io->key.data, f.write.io.key.data);
    keep(io->value.data, f.write.io.value.data);
  }
  keep(write.slots.slots, f.write.slots.slots);
  write.k_scale = write.v_scale = nullptr;
  write.k_scale_desc.data = write.v_scale_desc.data = nullptr;
  keep(gather.block_table.indices, f.gather.block_table.indices);
  gather.block_table.indptr = nullptr;
  keep(gather.seq_lens.lengths, f.gather.seq_lens.lengths);
}

TEST_CASE("random fields in descriptors never lead outside of the memory") {
  setenv("LMDEPLOY_CUDA_LIBRARY", "/no/library", 1);
  constexpr int kCases = 100000;
  std::mt19937 random(7);
  Fixture f;
  f.table.resize(256, 1);  // for every number of blocks that two random fields can agree on
  f.lengths.resize(16, 1);
  f.gather.block_table.indices = f.table.data();
  f.gather.seq_lens.lengths = f.lengths.data();
  const size_t cache_bytes = f.k.size();
  int accepted = 0;
  for (int i = 0; i < kCases; ++i) {
    kvx_cache_desc_t cache = f.cache;
    kvx_write_desc_t write = f.write;
    kvx_gather_desc_t gather = f.gather;
    for (int n = random() % 3; n >= 0; --n) {
      switch (random() % 3) {
        case 0:
          Mutate(cache, random);
          break;
        case 1:
          Mutate(write, random);
          break;
        default:
          Mutate(gather, random);
      }
    }
    RestorePointers(f, cache, write, gather);
    if (kvx_validate_cache_desc(&cache) == KVX_STATUS_OK &&
        !(IsInside(cache.k, cache_bytes) && IsInside(cache.v, cache_bytes))) {
      continue;  // the library cannot know the size of the memory
    }
    cache.pool.bytes_per_block = std::min(cache.pool.bytes_per_block, 256u);
    accepted += kvx_write_kv(&cache, &write, nullptr) == KVX_STATUS_OK;
    accepted += kvx_gather_kv(&cache, &gather, nullptr) == KVX_STATUS_OK;
  }
  CHECK(accepted > kCases / 10);
}

TEST_CASE("streams need the CUDA library") {
  setenv("LMDEPLOY_CUDA_LIBRARY", "/no/library", 1);
  CHECK(kvx_tm_wait_stream(nullptr, nullptr) == kUnsupported);
}

TEST_CASE("every exception becomes a status") {
  CHECK(StatusOf([] {}) == KVX_STATUS_OK);
  CHECK(StatusOf([] { throw Refusal{kOutside}; }) == kOutside);
  CHECK(StatusOf([] { throw turbomind::InvalidArgument("x"); }) == kInvalid);
  CHECK(StatusOf([] { throw turbomind::InternalError("x"); }) == KVX_STATUS_INTERNAL_ERROR);
  CHECK(StatusOf([] { throw std::bad_alloc(); }) == KVX_STATUS_INTERNAL_ERROR);
  CHECK(StatusOf([] { throw 1; }) == KVX_STATUS_INTERNAL_ERROR);
}

TEST_CASE("two threads write to disjoint slots of one cache") {
  Fixture f({.blocks = 64, .block_size = 16, .heads = 4, .head_dim = 64, .tokens = 500, .seqs = 1});
  const auto run = [&](uint32_t first, kvx_status_t& status) {
    kvx_write_desc_t write = f.write;
    std::vector<int64_t> slots(f.slots.size(), -1);
    for (uint32_t i = first; i < slots.size(); i += 2) {
      slots[i] = i;
    }
    write.slots.slots = slots.data();
    status = kvx_write_kv(&f.cache, &write, nullptr);
  };
  kvx_status_t even = kInvalid;
  kvx_status_t odd = kInvalid;
  std::thread other(run, 1, std::ref(odd));
  run(0, even);
  other.join();
  CHECK((even == KVX_STATUS_OK && odd == KVX_STATUS_OK));
  Fixture alone(
      {.blocks = 64, .block_size = 16, .heads = 4, .head_dim = 64, .tokens = 500, .seqs = 1});
  for (uint32_t i = 0; i < alone.slots.size(); ++i) {
    alone.slots[i] = i;
  }
  CHECK(kvx_write_kv(&alone.cache, &alone.write, nullptr) == KVX_STATUS_OK);
  CHECK(alone.Bytes() == f.Bytes());
}

}  // namespace
}  // namespace kvx
