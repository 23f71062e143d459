#ifndef KVX_ABI_H
#define KVX_ABI_H

/* KVX v1.1: a C ABI that describes paged KV caches, and writes and gathers their rows.
 *
 * C11 and C++17. Every struct begins with `size`, which the caller sets to its sizeof. A larger
 * size is accepted, so that later versions can add fields. Counts of products are computed in 64
 * bits.
 *
 * Functions are stateless, run in the caller's thread, keep no pointer and change nothing if they
 * return an error. Threads may call them at once unless they write to the same rows. Memory of a
 * GPU must stay valid until its stream has done the work.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_ABI_VERSION_MAJOR 1
#define KVX_ABI_VERSION_MINOR 1

#if defined(__GNUC__)
#define KVX_API __attribute__((visibility("default")))
#else
#define KVX_API
#endif

typedef enum kvx_status {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* a descriptor contradicts itself or the cache */
  KVX_STATUS_UNSUPPORTED = 2,      /* the descriptor is right, but this library cannot do it */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, a block id or a length lies outside */
  KVX_STATUS_INCOMPATIBLE = 4,     /* another major version */
  KVX_STATUS_INTERNAL_ERROR = 5    /* a bug in the library, or an error of the GPU's driver */
} kvx_status_t;

typedef enum kvx_dtype {
  KVX_DTYPE_INVALID = 0,
  KVX_DTYPE_F16 = 1,
  KVX_DTYPE_BF16 = 2,
  KVX_DTYPE_F32 = 3,
  KVX_DTYPE_F8_E4M3 = 4,
  KVX_DTYPE_F8_E5M2 = 5,
  KVX_DTYPE_S32 = 6,
  KVX_DTYPE_S64 = 7,
  KVX_DTYPE_U32 = 8,
  KVX_DTYPE_U64 = 9,
  KVX_DTYPE_U8 = 10
} kvx_dtype_t;

/* Where the memory of a call is. The tensors and the pool of a call are all HOST, or all DEVICE or
 * UNIFIED; other mixtures and UNKNOWN are UNSUPPORTED.
 *
 * Work on DEVICE and UNIFIED memory is queued on the caller's CUDA stream, and nothing waits for
 * it. Slots, tables, lengths and scales are then read by the GPU too. They lie in memory that it
 * can access, and are aligned to an element, else UNSUPPORTED. Nothing checks their contents before
 * a kernel reads them. A row with a slot, a block, a length or a scale that the host would refuse
 * is left as it was, and the call returns OK. If slots repeat, any of their rows is stored.
 *
 * UNSUPPORTED is also returned if the CUDA library libturbomind_cuda.so is not found beside this
 * one or does not fit, and if memory of one call belongs to several GPUs. Memory that no GPU can
 * access is INVALID_ARGUMENT. UNIFIED is managed or pinned memory. */
typedef enum kvx_memory_type {
  KVX_MEMORY_UNKNOWN = 0,
  KVX_MEMORY_HOST = 1,
  KVX_MEMORY_DEVICE = 2,
  KVX_MEMORY_UNIFIED = 3
} kvx_memory_type_t;

/* The order of the dimensions of a cache tensor. */
typedef enum kvx_layout {
  KVX_LAYOUT_INVALID = 0,
  /* [num_blocks, block_size, num_kv_heads, head_dim] */
  KVX_LAYOUT_BLOCK_NHD = 1,
  /* [num_blocks, num_kv_heads, block_size, head_dim] */
  KVX_LAYOUT_BLOCK_HND = 2,
  /* [num_blocks, num_kv_heads, head_dim / pack, block_size, pack] */
  KVX_LAYOUT_BLOCK_HND_PACKED = 3,
  /* [num_blocks, block_size, num_kv_heads, head_dim] with any strides */
  KVX_LAYOUT_BLOCK_CUSTOM = 15
} kvx_layout_t;

enum { KVX_MAX_TENSOR_DIMS = 5 };

typedef struct kvx_version {
  uint32_t size;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t abi_patch;
} kvx_version_t;

/* A tensor. In a cache, `shape` follows `layout` and the cache's counts, else INVALID_ARGUMENT.
 *
 * Row-major strides always work, and the stride of a dimension of size 1 does not matter. Others
 * are UNSUPPORTED if one is negative, if two elements could share an address, or if, in a layout
 * other than CUSTOM, one but the last is not a multiple of 16 bytes. `data` must be aligned to an
 * element, else UNSUPPORTED; 16 bytes are faster. K and V may differ in layout and dtype.
 */
typedef struct kvx_tensor_desc {
  uint32_t size;
  kvx_dtype_t dtype; /* of a cache: F16, BF16, F32, F8_E4M3 or F8_E5M2 */
  kvx_layout_t layout;
  kvx_memory_type_t memory;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* in elements */
  void* data;
} kvx_tensor_desc_t;

/* The memory that KV_OFFSETS tables point into. size 0 means that there is none. */
typedef struct kvx_pool_desc {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t bytes_per_block; /* of K or of V; at least the extent of a block */
  void* primary;
  void* secondary; /* or NULL */
} kvx_pool_desc_t;

/* A cache of num_blocks blocks with block_size tokens each. All counts are positive. Slot s is
 * token s % block_size of block s / block_size. */
typedef struct kvx_cache_desc {
  uint32_t size;
  uint32_t num_blocks;
  uint32_t block_size;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  kvx_tensor_desc_t k;
  kvx_tensor_desc_t v;
  kvx_pool_desc_t pool;
} kvx_cache_desc_t;

typedef enum kvx_block_table_format {
  KVX_BLOCK_TABLE_INVALID = 0,
  /* indices [seq_count, max_blocks_per_seq]: the block of each block_size tokens */
  KVX_BLOCK_TABLE_PACKED = 1,
  /* indices [indptr[seq_count]]: the block of each token. Sequence s has the entries from indptr[s]
   * to indptr[s + 1]; indptr begins with 0, does not fall and ends with indices_count. */
  KVX_BLOCK_TABLE_RAGGED = 2,
  /* indices [seq_count, beam_width, 2, max_blocks_per_seq]: the K blocks, then the V blocks. An
   * entry is an index into a pool; with its top bit set, into the secondary pool. A block of either
   * pool lies at index * bytes_per_block, and index < num_blocks. beam_width > 1 is UNSUPPORTED. */
  KVX_BLOCK_TABLE_KV_OFFSETS = 3
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags {
  KVX_BLOCK_TABLE_FLAG_NONE = 0,
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 /* required by KV_OFFSETS */
} kvx_block_table_flags_t;

/* The blocks of the tokens of some sequences. Entries behind a sequence's length are not read. */
typedef struct kvx_block_table {
  uint32_t size;
  kvx_block_table_format_t format;
  kvx_dtype_t index_dtype;  /* S32 or S64; KV_OFFSETS: S32 */
  kvx_dtype_t indptr_dtype; /* RAGGED: S32 or S64 */
  uint32_t seq_count;       /* positive, as is max_blocks_per_seq */
  uint32_t beam_width;      /* 1 unless KV_OFFSETS */
  uint32_t max_blocks_per_seq;
  const void* indices;
  const void* indptr;     /* NULL unless RAGGED */
  uint32_t indices_count; /* as the format says */
  uint32_t indptr_count;  /* RAGGED: seq_count + 1, else 0 */
  uint32_t flags;
} kvx_block_table_t;

/* The slot of each new token. A slot that is negative or invalid_slot writes nothing. */
typedef struct kvx_slot_mapping {
  uint32_t size;
  kvx_dtype_t dtype; /* S32 or S64 */
  uint32_t token_count;
  int64_t invalid_slot; /* -1 by default */
  const void* slots;
} kvx_slot_mapping_t;

/* The number of cached tokens of each sequence. */
typedef struct kvx_seq_lens {
  uint32_t size;
  kvx_dtype_t dtype;  /* S32 or S64 */
  uint32_t seq_count; /* that of the block table */
  const void* lengths;
} kvx_seq_lens_t;

/* Rows outside a cache: [num_tokens, num_kv_heads, head_dim], row-major, in F16, BF16 or F32, which
 * are converted, or in the FP8 dtype of the cache, whose codes are copied. Other strides are
 * UNSUPPORTED. `layout` is ignored. */
typedef struct kvx_kv_io_desc {
  uint32_t size;
  kvx_tensor_desc_t key;
  kvx_tensor_desc_t value;
  uint32_t num_tokens;
  uint32_t num_kv_heads; /* those of the cache */
  uint32_t head_dim;
} kvx_kv_io_desc_t;

typedef enum kvx_scale_granularity {
  KVX_SCALE_NONE = 0,
  KVX_SCALE_PER_TENSOR = 1,    /* [1], or ndim 0 */
  KVX_SCALE_PER_BLOCK = 2,     /* [num_blocks] */
  KVX_SCALE_PER_HEAD = 3,      /* [num_kv_heads] */
  KVX_SCALE_PER_BLOCK_HEAD = 4 /* [num_blocks, num_kv_heads] */
} kvx_scale_granularity_t;

/* The scales of an FP8 cache: F32, positive and finite, else INVALID_ARGUMENT. The stored code is
 * that of x / scale, rounded to nearest even and saturated. size 0 means that there are none. */
typedef struct kvx_scale_desc {
  uint32_t size;
  kvx_dtype_t dtype;
  kvx_scale_granularity_t granularity;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];
  int64_t stride[KVX_MAX_TENSOR_DIMS];
  const void* data;
} kvx_scale_desc_t;

/* New rows and their slots. Without data in a scale descriptor, k_scale and v_scale point to one
 * F32 for the tensor; if they are NULL, the scale is 1. */
typedef struct kvx_write_desc {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_slot_mapping_t slots;
  const void* k_scale;
  const void* v_scale;
  kvx_scale_desc_t k_scale_desc;
  kvx_scale_desc_t v_scale_desc;
} kvx_write_desc_t;

/* Rows to read. io is [seq_count * max_seq_len, num_kv_heads, head_dim], or in four dimensions
 * [seq_count, max_seq_len, num_kv_heads, head_dim]. Rows at or beyond min(length, max_seq_len) are
 * left as they were. A length beyond the table is OUT_OF_RANGE. There are no scales, so FP8 rows
 * are copied, and any other dtype is UNSUPPORTED. */
typedef struct kvx_gather_desc {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_block_table_t block_table;
  kvx_seq_lens_t seq_lens;
  uint32_t max_seq_len; /* positive */
} kvx_gather_desc_t;

/* Fills the version. `size` is 0, or at least that of the struct: then a caller that was built for
 * the major version `abi_major` gets INCOMPATIBLE from a library of another one. An `abi_major` of
 * 0 accepts every version. */
KVX_API kvx_status_t kvx_get_version(kvx_version_t* out_version);

/* Checks a cache without access to its memory. */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache);

/* Stores rows in the slots of a cache. `stream` is a cudaStream_t, and NULL is CUDA's default
 * stream. Of HOST memory it is ignored: the call has ended when it returns. */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                  void* stream);

/* Reads the rows of sequences. */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                   void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ABI_H */
