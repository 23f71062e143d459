// ⑥⑦ The selective scan of one value head of a sequence, for some columns of the state. What a
// token adds to the state is known before the state is read, so that a token needs one pass: a row
// is read, updated, written and multiplied with q.
//
// The first token reads the state from the pool and the last one writes it there. Between them, a
// group of columns stays in L1.

#include "turbomind/backend/cpu/isa/recurrent/recurrent.h"
#include "turbomind/backend/cpu/isa/recurrent/state_columns.h"

namespace turbomind::TM_ISA {
namespace {

constexpr float kZeros[kWideGroup * kLanes] = {};

// Rows of 16 N columns of a state.
template <class T>
struct Rows {
  T* first = nullptr;
  int64_t stride = 0;  // 0: all rows are the same

  TM_HD T* At(int row) const { return first + row * stride; }
};

// Updates the state and returns Sᵀq of the new one in `sums`.
template <int N>
TM_HD void Apply(const Update<N>& update, const float* q, int num_rows,
                 const Rows<const float>& from, const Rows<float>& to, F32x16 (&sums)[N]) {
  for (int j = 0; j < num_rows; ++j) {
    F32x16 row[N];
    update.Row(from.At(j), j, row);
    const F32x16 of_q = Set1(q[j]);
    for (int n = 0; n < N; ++n) {
      Store(to.At(j) + n * kLanes, row[n]);
      sums[n] = Fma(of_q, row[n], sums[n]);
    }
  }
}

template <int N>
TM_HD void Copy(const Rows<float>& from, const Rows<float>& to, int num_rows) {
  for (int j = 0; j < num_rows; ++j) {
    for (int n = 0; n < N * kLanes; n += kLanes) {
      Store(to.At(j) + n, Load(from.At(j) + n));
    }
  }
}

// Computes all tokens of the step for 16 N columns.
template <int N>
void RunTokens(const SelectiveScanParams& params, const Head& head, const SequenceStep& step,
               int column) {
  const StateHeads& p = params.heads;
  alignas(64) float block[kMaxStateDim * N * kLanes];
  float* state = head.State(p.state, step.slot) + column;
  Rows<const float> from = {state, p.value_dim};
  if (step.is_first) {
    from = {kZeros, 0};
  }
  float decays[kLanes];
  float steps[kLanes];
  const F32x16 skip = Set1(params.skip[head.head]);
  Saves saves(head, step);
  for (int t = 0; t < step.num_tokens; ++t) {
    const int lane = t % kLanes;
    if (lane == 0) {
      const int left = step.num_tokens - t;
      const F32x16 lengths = head.Steps(t, left < kLanes ? left : kLanes);
      Store(steps, lengths);
      Store(decays, head.Decays(lengths));
    }
    Rows<float> to = {block, N * kLanes};
    if (t + 1 == step.num_tokens) {
      to = {state, p.value_dim};
    }
    Update<N> update = {.decay = Set1(decays[lane]), .k = head.K(t)};
    F32x16 sums[N];
    const float* v = head.V(t) + column;
    for (int n = 0; n < N; ++n) {
      update.delta[n] = Mul(Set1(steps[lane]), Load(v + n * kLanes));
      sums[n] = Zero();
    }
    Apply(update, head.Q(t), p.key_dim, from, to, sums);
    for (int n = 0; n < N; ++n) {
      Store(head.Out(t) + column + n * kLanes, Fma(skip, Load(v + n * kLanes), sums[n]));
    }
    if (float* save = saves.After(t + 1); save != nullptr) {
      Copy<N>(to, {save + column, p.value_dim}, p.key_dim);
    }
    from = {to.first, to.stride};
  }
}

}  // namespace

void SelectiveScanRun(const SelectiveScanParams& params, const SequenceStep& step,
                      const ColumnRun& run) {
  const Head head = {&params.heads, run.head, step.first_token};
  const auto run_tokens = [&](auto index, int column) {
    RunTokens<decltype(index)::value>(params, head, step, run.begin + column);
  };
  if (step.num_tokens == 1) {
    ForGroups<kWideGroup>(run.end - run.begin, run_tokens);
  } else {
    ForGroups<kGroup>(run.end - run.begin, run_tokens);
  }
}

}  // namespace turbomind::TM_ISA
