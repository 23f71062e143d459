#ifndef KVX_TURBOMIND_H
#define KVX_TURBOMIND_H

/* The quantized layers of lmdeploy-fp4 (docs/kv_cache.md): an extension of KVX with a version of
 * its own. Rows are stored as the engine stores them and read back as plain floats. */

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_TM_VERSION_MAJOR 1
#define KVX_TM_VERSION_MINOR 2

/* The KV formats. The numbers are permanent. */
typedef enum kvx_tm_mode {
  KVX_TM_MODE_NONE = 0,
  KVX_TM_MODE_INT8 = 1,
  KVX_TM_MODE_INT4 = 2,
  KVX_TM_MODE_FP8_E4M3 = 3,
  KVX_TM_MODE_FP8_E5M2 = 4,
  KVX_TM_MODE_MXFP4 = 5,
  KVX_TM_MODE_NVFP4 = 6
} kvx_tm_mode_t;

typedef enum kvx_tm_flags {
  KVX_TM_FLAG_NONE = 0,
  KVX_TM_FLAG_ROTATED = 1, /* K is stored after a Hadamard rotation; head_dim % 16 is 0 */
  KVX_TM_FLAG_SEARCH = 2,  /* FP4 scales minimize the squared error */
  KVX_TM_FLAG_K_OFFSET = 4 /* each block has a row that is added to its keys (since 1.1); such
                            * blocks can be read, but not written, because their row is the mean of
                            * all keys */
} kvx_tm_flags_t;

/* One layer of a cache with num_blocks blocks, in HOST memory for the calls that move rows. Block b
 * lies at data + b * block_bytes, and its FP4 scales at scales + b * scale_block_bytes. Both
 * numbers may be larger than one layer needs, if blocks hold several layers; they are multiples
 * of 16. */
typedef struct kvx_tm_layer {
  uint32_t size;
  kvx_tm_mode_t k_mode;
  kvx_tm_mode_t v_mode;
  kvx_dtype_t dtype; /* of 16-bit values, scales and zeros: F16, BF16 or F32 */
  kvx_memory_type_t memory;
  uint32_t block_size; /* a power of two from 16 */
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t num_blocks;
  void* data;
  uint64_t block_bytes;
  void* scales; /* NULL without FP4 */
  uint64_t scale_block_bytes;
  const float* k_factors; /* [num_kv_heads] of fp8 and nvfp4, positive and finite; NULL means 1 */
  const float* v_factors;
  const float* k_mean; /* [num_kv_heads, head_dim], subtracted from K; NULL means 0 */
  uint32_t flags;
} kvx_tm_layer_t;

/* Returns INCOMPATIBLE unless this library has the same major and at least this minor version. */
KVX_API kvx_status_t kvx_tm_negotiate(uint32_t major, uint32_t minor);

/* Lets the work that `stream` gets from now on wait for the work that `other` has (since 1.2). Both
 * are CUDA streams, and NULL is the default stream. UNSUPPORTED without the CUDA library. */
KVX_API kvx_status_t kvx_tm_wait_stream(void* stream, void* other);

/* Fills block_bytes and scale_block_bytes for blocks of this layer alone. */
KVX_API kvx_status_t kvx_tm_describe(kvx_tm_layer_t* layer);

/* Describes a layer of the modes none, fp8 and fp8_e5m2 as a KVX cache over the same memory. Other
 * modes and layers with a changed K are UNSUPPORTED. */
KVX_API kvx_status_t kvx_tm_as_cache(const kvx_tm_layer_t* layer, kvx_cache_desc_t* out);

/* Stores rows. K is after RoPE; the layer's mean and rotation are applied here. The scales of
 * `write` are not used. */
KVX_API kvx_status_t kvx_tm_write_kv(const kvx_tm_layer_t* layer, const kvx_write_desc_t* write,
                                     void* stream);

/* Reads rows of a PACKED or RAGGED table as F16, BF16 or F32, with rotation and mean undone. */
KVX_API kvx_status_t kvx_tm_gather_kv(const kvx_tm_layer_t* layer, const kvx_gather_desc_t* gather,
                                      void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_TURBOMIND_H */
