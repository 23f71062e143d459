#include "turbomind/ops/quantize_blocks.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeQuantizeBlocks(Device& device, const QuantizeBlocksParams& params) {
  CheckLayer(params.kv);
  Check(params.window16.data != nullptr, "there must be a 16-bit pool");
  CheckWindow16Layer(params.kv, params.window16);
  Check(params.num_to_quantize == 0 || params.blocks_to_quantize != nullptr,
        "blocks_to_quantize must be set");
  for (int i = 0; i < params.num_to_quantize; ++i) {
    Check(params.blocks_to_quantize[i].window16 >= 0 && params.blocks_to_quantize[i].quantized >= 0,
          "both block ids of a pending quantization must be valid");
  }
  if (params.num_to_quantize > 0) {
    device.QuantizeBlocks(params);
  }
}

}  // namespace turbomind
