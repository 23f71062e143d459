#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

Case FastCase(const FormatPair& pair, int dim, KvCacheMode window_format) {
  Case c;
  c.shape.k = pair.k;
  c.shape.v = pair.v;
  c.shape.head_dim = dim;
  c.shape.context = 460;
  c.shape.k_offset = pair.k != KvCacheMode::kNone;
  c.group = dim == 128 ? 7 : 3;
  c.window = dim == 128 ? 200 : 0;
  c.sinks = dim != 128;
  c.first = c.shape.context - 140;
  c.window16 = {64, 64};
  c.window_format = window_format;
  c.fast_pairs = dim == 80 ? 1 : 4;
  return c;
}

// The waves are several times as large as the scores, whose digits they cancel.
constexpr double kFactor = 8;

TEST_CASE("prefill and decode add the fast bias with the same bits, close to double precision") {
  constexpr int kStride = 5;  // coprime to the loops, so that every value of each is reached
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {64, 80, 128}) {
      for (KvCacheMode window_format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
        if (i++ % kStride == 0) {
          Case c = FastCase(pair, dim, window_format);
          CheckBits(c, BestIsa(), kFactor * kMaxErrorAffine);
          c.exact = false;
          CheckBits(c, BestIsa(), kFactor * kMaxErrorRounded);
        }
      }
    }
  }
}

TEST_CASE("the fast bias is below the score cap and needs no window") {
  Case c = FastCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, 64, KvCacheMode::kNone);
  c.window16 = {};
  c.score_cap = 5.f;
  CheckBits(c, BestIsa(), kFactor * kMaxError);
  c.exact = false;
  CheckBits(c, BestIsa(), kFactor * kMaxErrorRounded);
}

TEST_CASE("with a fast bias, every instruction set returns the same bits") {
  for (KvCacheMode format : kAllKvCacheModes) {
    CheckEveryIsa(FastCase({format, format}, 80, KvCacheMode::kInt8));
  }
}

TEST_CASE("the reference detects a fast bias that is left out") {
  Case c = FastCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, 64, KvCacheMode::kNone);
  ThreadPool pool(1);
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  Case without = c;
  without.fast_pairs = 0;
  const std::vector<float> out =
      RunChunks(CpuKvKernelsFor(BestIsa()), pool, without, caches, in, c.shape.context);
  CHECK(ErrorOf(c, caches, in, out) > 100 * kFactor * kMaxErrorRounded);
}

TEST_CASE("a fast bias without waves for the context is refused") {
  Case c = FastCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, 64, KvCacheMode::kNone);
  Caches caches(c);
  Inputs in = MakeInputs(c);
  in.num_positions = 64;
  ThreadPool pool(1);
  const auto device = MakeCpuDevice(1, BestIsa());
  std::vector<float> out(static_cast<size_t>(c.shape.context) * 6 * 64);
  CHECK_THROWS_AS(RunStep({CpuKvKernelsFor(BestIsa()), pool, c, caches, in, device.get()}, 300, 100,
                          out.data()),
                  InternalError);
}

}  // namespace
}  // namespace turbomind
