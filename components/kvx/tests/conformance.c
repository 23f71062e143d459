/* The conformance tests of KVX (section 9 of its specification), as C11. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvx/kvx_abi.h"
#include "kvx/kvx_launch.h"
#include "kvx/kvx_turbomind.h"

static int failures = 0;

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                     \
    }                                                                 \
  } while (0)

enum { BLOCKS = 3, BLOCK_SIZE = 4, HEADS = 2, DIM = 8, PACK = 4, TOKENS = 5 };
enum { VALUES = BLOCKS * BLOCK_SIZE * HEADS * DIM, ROW = HEADS * DIM };

static float k_memory[VALUES];
static float v_memory[VALUES];

/* A row-major tensor of F32. */
static kvx_tensor_desc_t tensor(void* data, kvx_layout_t layout, const int64_t* shape,
                                uint32_t ndim) {
  kvx_tensor_desc_t desc;
  int64_t stride = 1;
  uint32_t i;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.dtype = KVX_DTYPE_F32;
  desc.layout = layout;
  desc.memory = KVX_MEMORY_HOST;
  desc.ndim = ndim;
  desc.data = data;
  for (i = ndim; i-- > 0;) {
    desc.shape[i] = shape[i];
    desc.stride[i] = stride;
    stride *= shape[i];
  }
  return desc;
}

static kvx_cache_desc_t cache_of(kvx_layout_t layout) {
  static const int64_t nhd[] = {BLOCKS, BLOCK_SIZE, HEADS, DIM};
  static const int64_t hnd[] = {BLOCKS, HEADS, BLOCK_SIZE, DIM};
  static const int64_t packed[] = {BLOCKS, HEADS, DIM / PACK, BLOCK_SIZE, PACK};
  const int64_t* shape = layout == KVX_LAYOUT_BLOCK_HND          ? hnd
                         : layout == KVX_LAYOUT_BLOCK_HND_PACKED ? packed
                                                                 : nhd;
  const uint32_t ndim = layout == KVX_LAYOUT_BLOCK_HND_PACKED ? 5 : 4;
  kvx_cache_desc_t cache;
  memset(&cache, 0, sizeof(cache));
  cache.size = sizeof(cache);
  cache.num_blocks = BLOCKS;
  cache.block_size = BLOCK_SIZE;
  cache.num_kv_heads = HEADS;
  cache.head_dim = DIM;
  cache.k = tensor(k_memory, layout, shape, ndim);
  cache.v = tensor(v_memory, layout, shape, ndim);
  return cache;
}

static kvx_kv_io_desc_t io_of(float* key, float* value, uint32_t tokens) {
  const int64_t shape[] = {tokens, HEADS, DIM};
  kvx_kv_io_desc_t io;
  memset(&io, 0, sizeof(io));
  io.size = sizeof(io);
  io.key = tensor(key, KVX_LAYOUT_BLOCK_CUSTOM, shape, 3);
  io.value = tensor(value, KVX_LAYOUT_BLOCK_CUSTOM, shape, 3);
  io.num_tokens = tokens;
  io.num_kv_heads = HEADS;
  io.head_dim = DIM;
  return io;
}

static kvx_write_desc_t write_of(float* key, float* value, const int64_t* slots, uint32_t tokens) {
  kvx_write_desc_t write;
  memset(&write, 0, sizeof(write));
  write.size = sizeof(write);
  write.io = io_of(key, value, tokens);
  write.slots.size = sizeof(write.slots);
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = tokens;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots;
  return write;
}

/* One sequence of TOKENS tokens in the blocks 2 and 0. */
static kvx_gather_desc_t gather_of(float* key, float* value) {
  static const int32_t blocks[] = {2, 0};
  static const int64_t lengths[] = {TOKENS};
  kvx_gather_desc_t gather;
  memset(&gather, 0, sizeof(gather));
  gather.size = sizeof(gather);
  gather.io = io_of(key, value, TOKENS);
  gather.block_table.size = sizeof(gather.block_table);
  gather.block_table.format = KVX_BLOCK_TABLE_PACKED;
  gather.block_table.index_dtype = KVX_DTYPE_S32;
  gather.block_table.seq_count = 1;
  gather.block_table.beam_width = 1;
  gather.block_table.max_blocks_per_seq = 2;
  gather.block_table.indices = blocks;
  gather.block_table.indices_count = 2;
  gather.seq_lens.size = sizeof(gather.seq_lens);
  gather.seq_lens.dtype = KVX_DTYPE_S64;
  gather.seq_lens.seq_count = 1;
  gather.seq_lens.lengths = lengths;
  gather.max_seq_len = TOKENS;
  return gather;
}

static void test_version(void) {
  kvx_version_t version;
  memset(&version, 0, sizeof(version));
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  CHECK(version.size == sizeof(version));
  CHECK(version.abi_major == KVX_ABI_VERSION_MAJOR && version.abi_minor == KVX_ABI_VERSION_MINOR);
  CHECK(version.abi_major == 1 && version.abi_minor == 1 && version.abi_patch == 0);
  version.size = sizeof(version) - 1;
  CHECK(kvx_get_version(&version) == KVX_STATUS_INVALID_ARGUMENT);
  version.size = 1000;
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  version.abi_major = KVX_ABI_VERSION_MAJOR + 1;
  CHECK(kvx_get_version(&version) == KVX_STATUS_INCOMPATIBLE);
  CHECK(version.size == sizeof(version) && version.abi_major == KVX_ABI_VERSION_MAJOR);
  version.abi_major = KVX_ABI_VERSION_MAJOR + 1;
  version.size = 0; /* the fields of a struct without a size do not count */
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  version.abi_major = 0;
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  CHECK(kvx_get_version(NULL) == KVX_STATUS_INVALID_ARGUMENT);
  CHECK(kvx_tm_negotiate(1, 0) == KVX_STATUS_OK);
  CHECK(kvx_tm_negotiate(1, KVX_TM_VERSION_MINOR) == KVX_STATUS_OK);
  CHECK(kvx_tm_negotiate(1, KVX_TM_VERSION_MINOR + 1) == KVX_STATUS_INCOMPATIBLE);
  CHECK(kvx_tm_negotiate(2, 0) == KVX_STATUS_INCOMPATIBLE);
}

static void test_sizes(void) {
  kvx_cache_desc_t cache = cache_of(KVX_LAYOUT_BLOCK_NHD);
  CHECK(sizeof(kvx_version_t) == 16 && sizeof(kvx_tensor_desc_t) == 112);
  CHECK(sizeof(kvx_pool_desc_t) == 32 && sizeof(kvx_cache_desc_t) == 280);
  CHECK(sizeof(kvx_block_table_t) == 64 && sizeof(kvx_slot_mapping_t) == 32);
  CHECK(sizeof(kvx_seq_lens_t) == 24 && sizeof(kvx_kv_io_desc_t) == 248);
  CHECK(sizeof(kvx_scale_desc_t) == 104 && sizeof(kvx_write_desc_t) == 512);
  CHECK(sizeof(kvx_gather_desc_t) == 352);
  cache.k.size += 8; /* a later version of the struct */
  CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_OK);
  cache.k.size = sizeof(cache.k) - 1;
  CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
}

static void test_layouts(void) {
  static const kvx_layout_t layouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                         KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM};
  size_t i;
  int d;
  for (i = 0; i < sizeof(layouts) / sizeof(layouts[0]); ++i) {
    const kvx_cache_desc_t right = cache_of(layouts[i]);
    kvx_cache_desc_t cache = right;
    CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_OK);
    for (d = 0; d < (int)right.k.ndim; ++d) {
      cache = right;
      cache.v.shape[d] += 1;
      CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
      cache = right;
      cache.v.stride[d] = -cache.v.stride[d];
      CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_UNSUPPORTED);
      cache = right;
      cache.v.stride[d] = 0;
      CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_UNSUPPORTED);
    }
    cache = right;
    cache.k.stride[0] += 1; /* 4 bytes */
    CHECK(kvx_validate_cache_desc(&cache) ==
          (layouts[i] == KVX_LAYOUT_BLOCK_CUSTOM ? KVX_STATUS_OK : KVX_STATUS_UNSUPPORTED));
    cache.k.stride[0] += 3;
    CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_OK);
    cache = right;
    cache.k.ndim -= 1;
    CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
    cache = right;
    cache.k.layout = KVX_LAYOUT_INVALID;
    CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
    cache = right;
    cache.num_kv_heads = 0;
    CHECK(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
  }
  CHECK(kvx_validate_cache_desc(NULL) == KVX_STATUS_INVALID_ARGUMENT);
}

static void test_tables(void) {
  static const int32_t ragged[] = {2, 2, 2, 2, 0};
  static const int32_t indptr[] = {0, TOKENS};
  static const int32_t offsets[] = {2, 0, 1, 1};
  static float key[TOKENS * ROW];
  static float value[TOKENS * ROW];
  kvx_cache_desc_t cache = cache_of(KVX_LAYOUT_BLOCK_NHD);
  kvx_gather_desc_t gather = gather_of(key, value);
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  gather.block_table.indices_count = 3;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  gather = gather_of(key, value);
  gather.block_table.indptr_count = 1;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  gather = gather_of(key, value);
  gather.block_table.beam_width = 2;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);

  gather = gather_of(key, value);
  gather.block_table.format = KVX_BLOCK_TABLE_RAGGED;
  gather.block_table.indices = ragged;
  gather.block_table.indices_count = TOKENS;
  gather.block_table.indptr_dtype = KVX_DTYPE_S32;
  gather.block_table.indptr = indptr;
  gather.block_table.indptr_count = 2;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  gather.block_table.indptr_count = 1;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  gather.block_table.indptr_count = 2;
  gather.block_table.indices_count = TOKENS - 1;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);

  gather = gather_of(key, value);
  gather.block_table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  gather.block_table.indices = offsets;
  gather.block_table.indices_count = 4;
  gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT); /* no pool */
  cache.pool.size = sizeof(cache.pool);
  cache.pool.memory = KVX_MEMORY_HOST;
  cache.pool.bytes_per_block = BLOCK_SIZE * ROW * sizeof(float);
  cache.pool.primary = k_memory;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_NONE;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  gather.block_table.index_dtype = KVX_DTYPE_S64;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
}

static void test_slots(void) {
  static const int64_t slots[TOKENS] = {8, -1, 10, 11, 0}; /* the tokens of gather_of, but one */
  static float key[TOKENS * ROW];
  static float value[TOKENS * ROW];
  static float got_key[TOKENS * ROW];
  static float got_value[TOKENS * ROW];
  kvx_cache_desc_t cache = cache_of(KVX_LAYOUT_BLOCK_HND_PACKED);
  kvx_write_desc_t write = write_of(key, value, slots, TOKENS);
  kvx_gather_desc_t gather = gather_of(got_key, got_value);
  int i;
  for (i = 0; i < TOKENS * ROW; ++i) {
    key[i] = (float)i + 1;
    value[i] = -(float)i - 1;
  }
  memset(k_memory, 0, sizeof(k_memory));
  memset(v_memory, 0, sizeof(v_memory));
  CHECK(kvx_launch_write_kv(&cache, &write, NULL) == KVX_STATUS_OK);
  CHECK(kvx_launch_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  for (i = 0; i < TOKENS * ROW; ++i) {
    const int is_hole = i / ROW == 1;
    CHECK(got_key[i] == (is_hole ? 0 : key[i]));
    CHECK(got_value[i] == (is_hole ? 0 : value[i]));
  }
  CHECK(kvx_launch_write_kv_prefill(&cache, &write, TOKENS, NULL) == KVX_STATUS_OK);
  CHECK(kvx_launch_write_kv_prefill(&cache, &write, 2, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  write.slots.invalid_slot = BLOCKS * BLOCK_SIZE;
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_OK);
}

/* Device memory. Every test above has its counterpart here, with tables in device memory too. */
#ifdef KVX_TEST_DEVICE

#include "kvx/tests/device_memory.h"

enum { MAX_COPIES = 64 };
static void* copies[MAX_COPIES];
static int num_copies;

static void* device_copy(const void* host, size_t num_bytes) {
  void* const memory = kvx_test_allocate(num_bytes);
  kvx_test_copy(memory, host, num_bytes, NULL);
  copies[num_copies++] = memory;
  return memory;
}

static void free_copies(void) {
  while (num_copies > 0) {
    kvx_test_free(copies[--num_copies]);
  }
}

static void move_to_device(kvx_tensor_desc_t* tensor, size_t num_bytes, kvx_memory_type_t memory) {
  tensor->data = device_copy(tensor->data, num_bytes);
  tensor->memory = memory;
}

static void move_io(kvx_kv_io_desc_t* io, kvx_memory_type_t memory) {
  const size_t num_bytes = (size_t)io->num_tokens * ROW * sizeof(float);
  move_to_device(&io->key, num_bytes, memory);
  move_to_device(&io->value, num_bytes, memory);
}

static kvx_cache_desc_t device_cache(kvx_layout_t layout, kvx_memory_type_t memory) {
  kvx_cache_desc_t cache = cache_of(layout);
  move_to_device(&cache.k, sizeof(k_memory), memory);
  move_to_device(&cache.v, sizeof(v_memory), memory);
  return cache;
}

static kvx_write_desc_t device_write(float* key, float* value, const int64_t* slots,
                                     kvx_memory_type_t memory) {
  kvx_write_desc_t write = write_of(key, value, slots, TOKENS);
  move_io(&write.io, memory);
  write.slots.slots = device_copy(slots, TOKENS * sizeof(*slots));
  return write;
}

static kvx_gather_desc_t device_gather(float* key, float* value, kvx_memory_type_t memory) {
  kvx_gather_desc_t gather = gather_of(key, value);
  move_io(&gather.io, memory);
  gather.block_table.indices = device_copy(gather.block_table.indices, 2 * sizeof(int32_t));
  gather.seq_lens.lengths = device_copy(gather.seq_lens.lengths, sizeof(int64_t));
  return gather;
}

/* Whether a row on the device begins with a value. */
static int begins_with(const kvx_tensor_desc_t* rows, int row, float wanted, void* stream) {
  float got = 0;
  kvx_test_copy(&got, (const float*)rows->data + row * ROW, sizeof(got), stream);
  return got == wanted;
}

static float key[TOKENS * ROW];
static float value[TOKENS * ROW];

static void fill_rows(void) {
  int i;
  for (i = 0; i < TOKENS * ROW; ++i) {
    key[i] = (float)i + 1;
    value[i] = -(float)i - 1;
  }
  memset(k_memory, 0, sizeof(k_memory));
  memset(v_memory, 0, sizeof(v_memory));
}

static void test_device_layouts(void) {
  static const kvx_layout_t layouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                         KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM};
  /* The tokens of gather_of, but one. Slots outside of the cache are left out, too. */
  static const int64_t slots[TOKENS] = {8, -1, 10, BLOCKS * BLOCK_SIZE, 0};
  static float empty[TOKENS * ROW];
  void* const streams[] = {NULL, kvx_test_make_stream()};
  int i;
  fill_rows();
  for (i = 0; i < 4; ++i) {
    void* const stream = streams[i % 2];
    const kvx_memory_type_t memory = i < 2 ? KVX_MEMORY_DEVICE : KVX_MEMORY_UNIFIED;
    const kvx_cache_desc_t cache = device_cache(layouts[i], memory);
    const kvx_write_desc_t write = device_write(key, value, slots, memory);
    const kvx_gather_desc_t gather = device_gather(empty, empty, memory);
    int token;
    CHECK(kvx_launch_write_kv(&cache, &write, stream) == KVX_STATUS_OK);
    CHECK(kvx_launch_gather_kv(&cache, &gather, stream) == KVX_STATUS_OK);
    for (token = 0; token < TOKENS; ++token) {
      const int is_hole = token == 1 || token == 3;
      const float wanted = is_hole ? 0 : key[token * ROW];
      CHECK(begins_with(&gather.io.key, token, wanted, stream));
      CHECK(begins_with(&gather.io.value, token, -wanted, stream));
    }
    free_copies();
  }
  kvx_test_free_stream(streams[1]);
}

static void test_device_tables(void) {
  static const int32_t ragged[] = {2, 1, 2, 2, BLOCKS}; /* the last one does not exist */
  static const int64_t indptr[] = {0, TOKENS};
  static const int32_t offsets[] = {2, INT32_MIN, 1, 1}; /* K: block 2, then 0 of the second pool */
  static float empty[TOKENS * ROW];
  kvx_cache_desc_t cache;
  kvx_gather_desc_t gather;
  int i;
  for (i = 0; i < VALUES; ++i) {
    k_memory[i] = (float)i;
    v_memory[i] = (float)i + 1000;
  }
  cache = device_cache(KVX_LAYOUT_BLOCK_NHD, KVX_MEMORY_DEVICE);
  gather = device_gather(empty, empty, KVX_MEMORY_DEVICE);
  gather.block_table.format = KVX_BLOCK_TABLE_RAGGED;
  gather.block_table.indices = device_copy(ragged, sizeof(ragged));
  gather.block_table.indices_count = TOKENS;
  gather.block_table.indptr_dtype = KVX_DTYPE_S64;
  gather.block_table.indptr = device_copy(indptr, sizeof(indptr));
  gather.block_table.indptr_count = 2;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  CHECK(begins_with(&gather.io.key, 0, (2 * BLOCK_SIZE + 0) * ROW, NULL));
  CHECK(begins_with(&gather.io.key, 1, (1 * BLOCK_SIZE + 1) * ROW, NULL));
  CHECK(begins_with(&gather.io.value, 3, (2 * BLOCK_SIZE + 3) * ROW + 1000, NULL));
  CHECK(begins_with(&gather.io.key, 4, 0, NULL));

  gather = device_gather(empty, empty, KVX_MEMORY_DEVICE);
  gather.block_table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  gather.block_table.indices = device_copy(offsets, sizeof(offsets));
  gather.block_table.indices_count = 4;
  gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  cache.pool.size = sizeof(cache.pool);
  cache.pool.memory = KVX_MEMORY_DEVICE;
  cache.pool.bytes_per_block = BLOCK_SIZE * ROW * sizeof(float);
  cache.pool.primary = cache.k.data;
  cache.pool.secondary = cache.v.data;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
  CHECK(begins_with(&gather.io.key, 0, 2 * BLOCK_SIZE * ROW, NULL));
  CHECK(begins_with(&gather.io.key, 4, 1000, NULL));
  CHECK(begins_with(&gather.io.value, 4, 1 * BLOCK_SIZE * ROW, NULL));
  cache.pool.memory = KVX_MEMORY_HOST;
  CHECK(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_UNSUPPORTED);
  free_copies();
}

static void test_device_refusals(void) {
  static const int64_t slots[TOKENS] = {8, 9, 10, 11, 0};
  kvx_cache_desc_t cache;
  kvx_write_desc_t right;
  kvx_write_desc_t write;
  fill_rows();
  cache = device_cache(KVX_LAYOUT_BLOCK_NHD, KVX_MEMORY_DEVICE);
  right = device_write(key, value, slots, KVX_MEMORY_DEVICE);
  write = right;
  write.io.value.memory = KVX_MEMORY_HOST; /* one kind in a call */
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_UNSUPPORTED);
  write.io.value.memory = KVX_MEMORY_UNKNOWN;
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_UNSUPPORTED);
  write = right;
  write.slots.slots = slots; /* in host memory */
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  write = right;
  write.io.key.data = key;
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  write = right;
  write.slots.slots = (const char*)right.slots.slots + 1; /* not aligned */
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_UNSUPPORTED);
  write = right;
  write.slots.token_count = write.io.num_tokens = 0;
  write.io.key.shape[0] = write.io.value.shape[0] = 0;
  CHECK(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_OK);
  CHECK(begins_with(&cache.k, 8, 0, NULL)); /* nothing has changed */
  right.io.key.memory = KVX_MEMORY_UNIFIED; /* goes with DEVICE */
  CHECK(kvx_write_kv(&cache, &right, NULL) == KVX_STATUS_OK);
  CHECK(begins_with(&cache.k, 8, 1, NULL));
  CHECK(kvx_tm_wait_stream(NULL, NULL) == KVX_STATUS_OK);
  free_copies();
}

static void test_devices(void) {
  test_device_layouts();
  test_device_tables();
  test_device_refusals();
}

#else

static void test_devices(void) {}

#endif

int main(void) {
  test_devices();
  test_version();
  test_sizes();
  test_layouts();
  test_tables();
  test_slots();
  return failures != 0;
}
