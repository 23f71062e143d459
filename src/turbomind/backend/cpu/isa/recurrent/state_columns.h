#pragma once

// ⑥⑦ What the rules of heads with a matrix state share: the tokens of a head, and groups of columns
// of its state. Lanes are columns, and a product adds the rows in ascending order, so no sum
// depends on the lanes of a register.

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/isa/simd/simd_math.h"
#include "turbomind/backend/cpu/recurrent_kernels.h"

namespace turbomind::TM_ISA {

// Vectors of columns that are computed at once, at most 4. Their sums stay in registers.
#if defined(TM_ISA_avx512)
inline constexpr int kGroup = 4;
#else
inline constexpr int kGroup = 2;
#endif

// Of a step of one token, which reads the state from the pool: more of a row lies together. On
// AVX2, twice as many are slower than these.
inline constexpr int kWideGroup = 2 * kGroup;

// Calls fn(Index<M>(), column) for groups of 16 M of `columns` columns: M is N as long as there are
// so many, then less.
template <int N, class F>
TM_HD void ForGroups(int columns, F fn, int column = 0) {
  for (; column + N * kLanes <= columns; column += N * kLanes) {
    fn(Index<N>(), column);
  }
  if constexpr (N > 1) {
    ForGroups<N / 2>(columns, fn, column);
  }
}

// What a value head reads and writes in a step.
struct Head {
  const StateHeads* heads = nullptr;
  int head = 0;
  int first_token = 0;

  TM_HD int64_t Row(int token) const { return int64_t{first_token} + token; }
  TM_HD int64_t KeyColumn(int token) const {
    return Row(token) * heads->qkv_stride + int64_t{heads->KeyHead(head)} * heads->key_dim;
  }
  TM_HD const float* Q(int token) const { return heads->q + KeyColumn(token); }
  TM_HD const float* K(int token) const { return heads->k + KeyColumn(token); }
  TM_HD const float* V(int token) const {
    return heads->v + Row(token) * heads->qkv_stride + int64_t{head} * heads->value_dim;
  }
  TM_HD float* Out(int token) const {
    return heads->out + (Row(token) * heads->value_heads + head) * heads->value_dim;
  }
  // Returns the head's state in a slot.
  TM_HD float* State(const StateView& view, int32_t slot) const {
    return view.At(slot) + int64_t{head} * heads->key_dim * heads->value_dim;
  }

  // Returns the values of a gate for up to 16 tokens from `first` on, and zeros.
  TM_HD F32x16 Gates(const float* gate, int first, int count) const {
    float values[kLanes] = {};
    for (int i = 0; i < count; ++i) {
      values[i] = gate[Row(first + i) * heads->gate_stride + head];
    }
    return Load(values);
  }
  // Returns softplus(a + dt_bias) of these tokens.
  TM_HD F32x16 Steps(int first, int count) const {
    return Softplus(Add(Gates(heads->a, first, count), Set1(heads->dt_bias[head])));
  }
  // Returns the factors of the state for steps of these lengths.
  TM_HD F32x16 Decays(F32x16 steps) const { return Exp(Mul(Set1(-heads->decay[head]), steps)); }
};

// What a token adds to 16 N columns: S = decay * S + k ⊗ delta.
template <int N>
struct Update {
  F32x16 decay = {};
  const float* k = nullptr;
  F32x16 delta[N] = {};

  // Computes row j of the new state from that of the old one.
  TM_HD void Row(const float* from, int j, F32x16 (&row)[N]) const {
    const F32x16 factor = Set1(k[j]);
    for (int n = 0; n < N; ++n) {
      row[n] = Fma(factor, delta[n], Mul(decay, Load(from + n * kLanes)));
    }
  }
};

// The saves of a head's state during a step, in order.
class Saves {
 public:
  TM_HD Saves(const Head& head, const SequenceStep& step)
      : head_(head), next_(step.saves), end_(step.saves + step.num_saves) {}

  // Returns where the state after the first `num_tokens` new tokens is saved, or null. Call it for
  // each token in order.
  TM_HD float* After(int num_tokens) {
    if (next_ == end_ || next_->num_tokens != num_tokens) {
      return nullptr;
    }
    return head_.State(head_.heads->state, next_++->slot);
  }

 private:
  const Head& head_;
  const StateSave* next_;
  const StateSave* end_;
};

}  // namespace turbomind::TM_ISA
