#pragma once

// Descriptors over memory of their own, for tests.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "kvx/kvx_abi.h"

namespace kvx {

inline std::vector<std::byte> RandomBytes(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) {
    b = static_cast<std::byte>(random() & 0x3f);  // small floats in every dtype
  }
  return bytes;
}

inline int64_t BytesOf(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F32 ? 4 : (dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 ? 2 : 1);
}

inline kvx_tensor_desc_t RowMajor(void* data, kvx_dtype_t dtype, kvx_layout_t layout,
                                  std::initializer_list<int64_t> shape) {
  kvx_tensor_desc_t desc = {};
  desc.size = sizeof(desc);
  desc.dtype = dtype;
  desc.layout = layout;
  desc.memory = KVX_MEMORY_HOST;
  desc.ndim = static_cast<uint32_t>(shape.size());
  desc.data = data;
  std::copy(shape.begin(), shape.end(), desc.shape);
  int64_t stride = 1;
  for (int i = static_cast<int>(shape.size()) - 1; i >= 0; --i) {
    desc.stride[i] = stride;
    stride *= desc.shape[i];
  }
  return desc;
}

struct Sizes {
  uint32_t blocks = 5;
  uint32_t block_size = 4;
  uint32_t heads = 2;
  uint32_t head_dim = 16;
  uint32_t tokens = 7;  // of a write, and of each sequence of a gather
  uint32_t seqs = 2;

  size_t cache_values() const { return size_t{blocks} * block_size * heads * head_dim; }
  size_t io_values() const { return size_t{tokens} * seqs * heads * head_dim; }
};

// A cache of F16 in HND order, F32 rows for it, and a write and a gather of all of them.
class Fixture {
 public:
  explicit Fixture(Sizes sizes = {}) : sizes_(sizes) {
    const auto [blocks, block_size, heads, dim, tokens, seqs] = sizes;
    cache.size = sizeof(cache);
    cache.num_blocks = blocks;
    cache.block_size = block_size;
    cache.num_kv_heads = heads;
    cache.head_dim = dim;
    cache.k =
        RowMajor(k.data(), KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_HND, {blocks, heads, block_size, dim});
    cache.v =
        RowMajor(v.data(), KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_HND, {blocks, heads, block_size, dim});
    write.size = sizeof(write);
    write.io = Io(tokens);
    for (uint32_t i = 0; i < tokens; ++i) {
      slots.push_back(static_cast<int64_t>(i * 5 + 2) % (blocks * block_size));
    }
    write.slots = {sizeof(write.slots), KVX_DTYPE_S64, tokens, -1, slots.data()};
    gather.size = sizeof(gather);
    gather.io = Io(seqs * tokens);
    const uint32_t per_seq = (tokens + block_size - 1) / block_size;
    for (uint32_t i = 0; i < seqs * per_seq; ++i) {
      table.push_back(static_cast<int32_t>((3 * i + 1) % blocks));
    }
    lengths.assign(seqs, static_cast<int32_t>(tokens));
    gather.block_table.size = sizeof(gather.block_table);
    gather.block_table.format = KVX_BLOCK_TABLE_PACKED;
    gather.block_table.index_dtype = KVX_DTYPE_S32;
    gather.block_table.seq_count = seqs;
    gather.block_table.beam_width = 1;
    gather.block_table.max_blocks_per_seq = per_seq;
    gather.block_table.indices = table.data();
    gather.block_table.indices_count = seqs * per_seq;
    gather.seq_lens = {sizeof(gather.seq_lens), KVX_DTYPE_S32, seqs, lengths.data()};
    gather.max_seq_len = tokens;
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  // All bytes that a call could change.
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> all = k;
    for (const auto* memory : {&v, &key, &value}) {
      all.insert(all.end(), memory->begin(), memory->end());
    }
    return all;
  }

 private:
  Sizes sizes_;

 public:
  std::vector<std::byte> k = RandomBytes(2 * sizes_.cache_values(), 1);
  std::vector<std::byte> v = RandomBytes(2 * sizes_.cache_values(), 2);
  std::vector<std::byte> key = RandomBytes(4 * sizes_.io_values(), 3);
  std::vector<std::byte> value = RandomBytes(4 * sizes_.io_values(), 4);
  std::vector<int64_t> slots;
  std::vector<int32_t> table;
  std::vector<int32_t> lengths;
  kvx_cache_desc_t cache = {};
  kvx_write_desc_t write = {};
  kvx_gather_desc_t gather = {};

 private:
  kvx_kv_io_desc_t Io(uint32_t tokens) {
    kvx_kv_io_desc_t io = {};
    io.size = sizeof(io);
    io.num_tokens = tokens;
    io.num_kv_heads = sizes_.heads;
    io.head_dim = sizes_.head_dim;
    io.key = RowMajor(key.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_CUSTOM,
                      {tokens, sizes_.heads, sizes_.head_dim});
    io.value = RowMajor(value.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_CUSTOM,
                        {tokens, sizes_.heads, sizes_.head_dim});
    return io;
  }
};

}  // namespace kvx
