#include "turbomind/ops/quantize_blocks.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeQuantiseBlocks(Device& device, const QuantiseBlocksParams& params) {
  CheckLayer(params.kv);
  Check(params.hot.data != nullptr, "there is a hot pool");
  CheckHotLayer(params.kv, params.hot);
  Check(params.num_moves == 0 || params.moves != nullptr, "moves is set");
  for (int i = 0; i < params.num_moves; ++i) {
    Check(params.moves[i].hot >= 0 && params.moves[i].cold >= 0, "both blocks of a move are there");
  }
  if (params.num_moves > 0) {
    device.QuantiseBlocks(params);
  }
}

}  // namespace turbomind
