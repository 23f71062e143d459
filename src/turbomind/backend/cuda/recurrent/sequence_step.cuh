#pragma once

// The new tokens of a sequence of a step, and the states that it reads and writes.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind::cuda {

// The arrays of `batch` and `states` are GPU addresses.
struct SequenceStep {
  TM_DEVICE SequenceStep(const BatchView& batch, const StateBatch& states, int seq)
      : slot(LoadGlobal(states.slots + seq)), first_token(LoadGlobal(batch.cu_seqlens + seq)) {
    num_tokens = LoadGlobal(batch.cu_seqlens + seq + 1) - first_token;
    is_first = LoadGlobal(batch.context_lens + seq) == num_tokens;
    save = states.saves;
    last_save = states.saves + states.num_saves;
    while (save != last_save && LoadGlobal(&save->sequence) < seq) {
      ++save;
    }
    FindSave(seq);
  }

  // Step to the next save of the sequence.
  TM_DEVICE void FindSave(int seq) {
    const bool has_save = save != last_save && LoadGlobal(&save->sequence) == seq;
    save_tokens = has_save ? LoadGlobal(&save->num_tokens) : 0;
    save_slot = has_save ? LoadGlobal(&save->slot) : 0;
    save += has_save ? 1 : 0;
  }

  int64_t slot;
  int64_t first_token;
  int num_tokens;
  bool is_first;      // the state is zero
  int save_tokens;    // the next save follows so many new tokens; 0: there is none
  int64_t save_slot;  // of this save
  const StateSave* save;
  const StateSave* last_save;
};

}  // namespace turbomind::cuda
