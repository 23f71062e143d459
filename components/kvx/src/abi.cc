// The functions of the public headers. No exception leaves them.

#include "kvx/kvx_abi.h"
#include "kvx/kvx_launch.h"
#include "kvx/kvx_turbomind.h"
#include "kvx/src/gpu.h"
#include "kvx/src/quantized.h"
#include "kvx/src/status.h"
#include "kvx/src/transfer.h"
#include "kvx/src/validate.h"

namespace {

static_assert(sizeof(kvx_version_t) == 16);
static_assert(sizeof(kvx_tensor_desc_t) == 112);
static_assert(sizeof(kvx_pool_desc_t) == 32);
static_assert(sizeof(kvx_cache_desc_t) == 280);
static_assert(sizeof(kvx_block_table_t) == 64);
static_assert(sizeof(kvx_slot_mapping_t) == 32);
static_assert(sizeof(kvx_seq_lens_t) == 24);
static_assert(sizeof(kvx_kv_io_desc_t) == 248);
static_assert(sizeof(kvx_scale_desc_t) == 104);
static_assert(sizeof(kvx_write_desc_t) == 512);
static_assert(sizeof(kvx_gather_desc_t) == 352);
static_assert(sizeof(kvx_tm_layer_t) == 104);

}  // namespace

extern "C" {

kvx_status_t kvx_get_version(kvx_version_t* out_version) {
  if (out_version == nullptr ||
      (out_version->size != 0 && out_version->size < sizeof(*out_version))) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  const uint32_t wanted = out_version->size == 0 ? 0 : out_version->abi_major;
  *out_version = {sizeof(*out_version), KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR, 0};
  const bool is_known = wanted == 0 || wanted == KVX_ABI_VERSION_MAJOR;
  return is_known ? KVX_STATUS_OK : KVX_STATUS_INCOMPATIBLE;
}

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache) {
  return kvx::StatusOf([&] { kvx::CheckCache(cache); });
}

kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                          void* stream) {
  return kvx::StatusOf([&] { kvx::WriteKv(cache, write, stream); });
}

kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                           void* stream) {
  return kvx::StatusOf([&] { kvx::GatherKv(cache, gather, stream); });
}

kvx_status_t kvx_launch_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                 void* stream) {
  return kvx_write_kv(cache, write, stream);
}

kvx_status_t kvx_launch_write_kv_prefill(const kvx_cache_desc_t* cache,
                                         const kvx_write_desc_t* write, int32_t tokens_per_seq,
                                         void* stream) {
  if (write == nullptr || write->size < sizeof(*write) || tokens_per_seq <= 0 ||
      write->io.num_tokens % static_cast<uint32_t>(tokens_per_seq) != 0) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  return kvx_write_kv(cache, write, stream);
}

kvx_status_t kvx_launch_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                  void* stream) {
  return kvx_gather_kv(cache, gather, stream);
}

kvx_status_t kvx_tm_negotiate(uint32_t major, uint32_t minor) {
  const bool is_known = major == KVX_TM_VERSION_MAJOR && minor <= KVX_TM_VERSION_MINOR;
  return is_known ? KVX_STATUS_OK : KVX_STATUS_INCOMPATIBLE;
}

kvx_status_t kvx_tm_wait_stream(void* stream, void* other) {
  return kvx::StatusOf([&] { kvx::WaitForStream(stream, other); });
}

kvx_status_t kvx_tm_describe(kvx_tm_layer_t* layer) {
  return kvx::StatusOf([&] { kvx::Describe(layer); });
}

kvx_status_t kvx_tm_as_cache(const kvx_tm_layer_t* layer, kvx_cache_desc_t* out) {
  return kvx::StatusOf([&] { kvx::AsCache(layer, out); });
}

kvx_status_t kvx_tm_write_kv(const kvx_tm_layer_t* layer, const kvx_write_desc_t* write,
                             void* /*stream*/) {
  return kvx::StatusOf([&] { kvx::WriteQuantized(layer, write); });
}

kvx_status_t kvx_tm_gather_kv(const kvx_tm_layer_t* layer, const kvx_gather_desc_t* gather,
                              void* /*stream*/) {
  return kvx::StatusOf([&] { kvx::GatherQuantized(layer, gather); });
}

}  // extern "C"
