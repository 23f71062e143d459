// ⑥⑦ The gated delta rule of one value head of a sequence, for some columns of the state. Both
// products of a token read the state before it, so that a token needs one pass:
//   delta = beta * (v - decay * Sᵀk')
//   out   = decay * Sᵀq' + (q' · k') * delta
//   S     = decay * S + k' ⊗ delta
// The norms of q and k multiply the products and delta instead of q and k.
//
// One new token: the state is read from the pool in order and once more, from L2, when it is
// updated. Several: a group of columns stays in L1, and the update of a token is fused with the
// products of the next one.

#include "turbomind/backend/cpu/isa/recurrent/recurrent.h"
#include "turbomind/backend/cpu/isa/recurrent/state_columns.h"

namespace turbomind::TM_ISA {
namespace {

constexpr float kNormEps = 1e-6f;

// The factors of 16 tokens of a head.
struct Factors {
  float decay[kLanes];    // of the state
  float beta[kLanes];     // of delta
  float k_scale[kLanes];  // k' / k
  float q_scale[kLanes];  // q' / q
  float qk[kLanes];       // q' · k'
};

struct DeltaHead : Head {
  const float* b = nullptr;
};

TM_HD void SetNorms(const Head& head, int token, int lane, Factors& factors) {
  const float* q = head.Q(token);
  const float* k = head.K(token);
  F32x16 qq = Zero();
  F32x16 kk = Zero();
  F32x16 qk = Zero();
  for (int i = 0; i < head.heads->key_dim; i += kLanes) {
    const F32x16 some_q = Load(q + i);
    const F32x16 some_k = Load(k + i);
    qq = Fma(some_q, some_q, qq);
    kk = Fma(some_k, some_k, kk);
    qk = Fma(some_q, some_k, qk);
  }
  const float root = __builtin_sqrtf(static_cast<float>(head.heads->key_dim));
  factors.q_scale[lane] = 1.f / (__builtin_sqrtf(ReduceAdd(qq) + kNormEps) * root);
  factors.k_scale[lane] = 1.f / __builtin_sqrtf(ReduceAdd(kk) + kNormEps);
  factors.qk[lane] = ReduceAdd(qk) * factors.q_scale[lane] * factors.k_scale[lane];
}

// Computes the factors of up to 16 tokens from `first` on.
void SetFactors(const DeltaHead& head, int first, int count, Factors& factors) {
  for (int i = 0; i < count; ++i) {
    SetNorms(head, first + i, i, factors);
  }
  Store(factors.decay, head.Decays(head.Steps(first, count)));
  Store(factors.beta, Sigmoid(head.Gates(head.b, first, count)));
}

// Sᵀk and Sᵀq of 16 N columns.
template <int N>
struct Products {
  F32x16 k[N];
  F32x16 q[N];
};

template <int N>
TM_HD Products<N> NoProducts() {
  Products<N> none;
  for (int n = 0; n < N; ++n) {
    none.k[n] = none.q[n] = Zero();
  }
  return none;
}

template <int N>
TM_HD void AddRow(const F32x16 (&row)[N], float k, float q, Products<N>& sums) {
  const F32x16 of_k = Set1(k);
  const F32x16 of_q = Set1(q);
  for (int n = 0; n < N; ++n) {
    sums.k[n] = Fma(of_k, row[n], sums.k[n]);
    sums.q[n] = Fma(of_q, row[n], sums.q[n]);
  }
}

// Adds the products of `rows` rows with k and q.
template <int N>
TM_HD void AddProducts(const float* state, int64_t stride, int rows, const float* k, const float* q,
                       Products<N>& sums) {
  for (int j = 0; j < rows; ++j) {
    F32x16 row[N];
    for (int n = 0; n < N; ++n) {
      row[n] = Load(state + j * stride + n * kLanes);
    }
    AddRow(row, k[j], q[j], sums);
  }
}

// Writes the output of a token and returns its update. `v` and `out` are those of the columns.
template <int N>
TM_HD Update<N> Finish(const Factors& factors, int lane, const Products<N>& products,
                       const float* k, const float* v, float* out) {
  Update<N> update = {.decay = Set1(factors.decay[lane]), .k = k};
  const F32x16 minus_k = Set1(-(factors.decay[lane] * factors.k_scale[lane]));
  const F32x16 of_q = Set1(factors.decay[lane] * factors.q_scale[lane]);
  for (int n = 0; n < N; ++n) {
    const F32x16 error = Fma(minus_k, products.k[n], Load(v + n * kLanes));
    const F32x16 delta = Mul(Set1(factors.beta[lane]), error);
    Store(out + n * kLanes, Fma(Set1(factors.qk[lane]), delta, Mul(of_q, products.q[n])));
    update.delta[n] = Mul(Set1(factors.k_scale[lane]), delta);
  }
  return update;
}

// 16 N columns of a state, copied so that their rows are adjacent.
template <int N>
struct Block {
  static constexpr int kWidth = N * kLanes;

  // Sets the block to `from`, or to zeros.
  void Fill(const float* from, int num_rows, int64_t stride) {
    rows = num_rows;
    for (int j = 0; j < rows; ++j) {
      for (int n = 0; n < kWidth; n += kLanes) {
        Store(values + j * kWidth + n, from == nullptr ? Zero() : Load(from + j * stride + n));
      }
    }
  }

  // Updates the block and adds the products of the new values.
  TM_HD void Apply(const Update<N>& update, const float* k, const float* q, Products<N>& sums) {
    for (int j = 0; j < rows; ++j) {
      F32x16 row[N];
      float* at = values + j * kWidth;
      update.Row(at, j, row);
      for (int n = 0; n < N; ++n) {
        Store(at + n * kLanes, row[n]);
      }
      AddRow(row, k[j], q[j], sums);
    }
  }

  // Writes what the block would be after the update.
  void WriteUpdated(const Update<N>& update, float* to, int64_t stride) const {
    for (int j = 0; j < rows; ++j) {
      F32x16 row[N];
      update.Row(values + j * kWidth, j, row);
      for (int n = 0; n < N; ++n) {
        Store(to + j * stride + n * kLanes, row[n]);
      }
    }
  }

  alignas(64) float values[kMaxStateDim * kWidth];
  int rows = 0;
};

// Computes all tokens of the step for 16 N columns.
template <int N>
void RunTokens(const DeltaHead& head, const SequenceStep& step, int column) {
  const StateHeads& p = *head.heads;
  float* state = head.State(p.state, step.slot) + column;
  Block<N> block;
  block.Fill(step.is_first ? nullptr : state, p.key_dim, p.value_dim);
  Factors factors;
  Update<N> update;
  Saves saves(head, step);
  for (int t = 0; t < step.num_tokens; ++t) {
    const int lane = t % kLanes;
    if (lane == 0) {
      const int left = step.num_tokens - t;
      SetFactors(head, t, left < kLanes ? left : kLanes, factors);
    }
    Products<N> products = NoProducts<N>();
    if (t == 0) {
      AddProducts(block.values, block.kWidth, p.key_dim, head.K(t), head.Q(t), products);
    } else {
      block.Apply(update, head.K(t), head.Q(t), products);
    }
    update = Finish(factors, lane, products, head.K(t), head.V(t) + column, head.Out(t) + column);
    if (float* to = saves.After(t + 1); to != nullptr) {
      block.WriteUpdated(update, to + column, p.value_dim);
    }
  }
  block.WriteUpdated(update, state, p.value_dim);
}

// Computes the only token of the step. Reads the state in the order in which it lies in memory.
void RunToken(const DeltaHead& head, const SequenceStep& step, const ColumnRun& run) {
  const StateHeads& p = *head.heads;
  const int columns = run.end - run.begin;
  const int64_t stride = p.value_dim;
  float* state = head.State(p.state, step.slot) + run.begin;
  const float* k = head.K(0);
  const float* q = head.Q(0);
  Factors factors;
  SetFactors(head, 0, 1, factors);
  if (step.is_first) {
    for (int j = 0; j < p.key_dim; ++j) {
      __builtin_memset(state + j * stride, 0, static_cast<size_t>(columns) * sizeof(float));
    }
  }
  alignas(64) float deltas[kMaxStateDim];
  ForGroups<kWideGroup>(
      columns, [&](auto index, int column) __attribute__((always_inline)) {
        constexpr int N = decltype(index)::value;
        Products<N> products = NoProducts<N>();
        AddProducts(state + column, stride, p.key_dim, k, q, products);
        const int at = run.begin + column;
        const Update<N> update = Finish(factors, 0, products, k, head.V(0) + at, head.Out(0) + at);
        for (int n = 0; n < N; ++n) {
          Store(deltas + column + n * kLanes, update.delta[n]);
        }
      });
  float* save = Saves(head, step).After(1);
  for (int j = 0; j < p.key_dim; ++j) {
    ForGroups<kGroup>(
        columns, [&](auto index, int column) __attribute__((always_inline)) {
          constexpr int N = decltype(index)::value;
          const int64_t at = j * stride + column;
          Update<N> update = {.decay = Set1(factors.decay[0]), .k = k};
          F32x16 row[N];
          for (int n = 0; n < N; ++n) {
            update.delta[n] = Load(deltas + column + n * kLanes);
          }
          update.Row(state + at, j, row);
          for (int n = 0; n < N; ++n) {
            Store(state + at + n * kLanes, row[n]);
            if (save != nullptr) {
              Store(save + run.begin + at + n * kLanes, row[n]);
            }
          }
        });
  }
}

}  // namespace

void GatedDeltaRun(const GatedDeltaParams& params, const SequenceStep& step, const ColumnRun& run) {
  const DeltaHead head = {{&params.heads, run.head, step.first_token}, params.b};
  if (step.num_tokens == 1) {
    RunToken(head, step, run);
    return;
  }
  ForGroups<kGroup>(run.end - run.begin, [&](auto index, int column) {
    RunTokens<decltype(index)::value>(head, step, run.begin + column);
  });
}

}  // namespace turbomind::TM_ISA
