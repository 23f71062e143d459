// ⑤ A request's state in the engine.

#include "turbomind/engine/sequence.h"

#include <algorithm>
#include <utility>

namespace turbomind {
namespace {

std::unique_ptr<Drafter> MakeDrafter(const EngineConfig& config, int64_t longest) {
  if (config.draft_model != nullptr) {
    return std::make_unique<ModelDrafter>(config.num_draft_tokens);
  }
  return std::make_unique<NgramDrafter>(longest, config.num_draft_tokens);
}

}  // namespace

std::unique_ptr<Sequence> MakeSequence(std::shared_ptr<Request> request,
                                       const EngineConfig& config) {
  auto sequence = std::make_unique<Sequence>();
  const int64_t longest =
      std::min(int64_t{config.session_len},
               static_cast<int64_t>(request->prompt.size()) + request->max_new_tokens);
  sequence->tokens.reserve(static_cast<size_t>(longest));
  sequence->output.tokens.reserve(1);
  if (config.num_draft_tokens > 0 && request->max_new_tokens > 1) {
    sequence->draft.reserve(static_cast<size_t>(config.num_draft_tokens));
    sequence->drafter = MakeDrafter(config, longest);
  }
  sequence->tokens = request->prompt;
  sequence->num_prompt = sequence->num_tokens() - request->num_resumed;
  sequence->output.request_id = request->id;
  sequence->request = std::move(request);
  return sequence;
}

}  // namespace turbomind
