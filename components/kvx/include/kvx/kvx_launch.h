#ifndef KVX_LAUNCH_H
#define KVX_LAUNCH_H

/* The calls of kvx_abi.h under the names of KVX's kernels. */

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

KVX_API kvx_status_t kvx_launch_write_kv(const kvx_cache_desc_t* cache,
                                         const kvx_write_desc_t* write, void* stream);

/* Stores the rows of sequences that all have tokens_per_seq tokens, a divisor of num_tokens. */
KVX_API kvx_status_t kvx_launch_write_kv_prefill(const kvx_cache_desc_t* cache,
                                                 const kvx_write_desc_t* write,
                                                 int32_t tokens_per_seq, void* stream);

KVX_API kvx_status_t kvx_launch_gather_kv(const kvx_cache_desc_t* cache,
                                          const kvx_gather_desc_t* gather, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_LAUNCH_H */
