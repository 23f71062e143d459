#include "turbomind/backend/cuda/decode/decode_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "kv/first_seen.h"

namespace turbomind::cuda {
namespace {

using Random = std::mt19937;

std::vector<DecodeRange> RandomRanges(Random& random) {
  std::vector<DecodeRange> ranges(random() % 12);
  const unsigned longest = random() % 3 == 0 ? 300 : random() % 3 == 0 ? 200000 : 5000;
  for (DecodeRange& range : ranges) {
    range.begin = static_cast<int32_t>(random() % 2 == 0 ? random() % 5000 : 0);
    range.end = range.begin + static_cast<int32_t>(random() % 6 == 0 ? 0 : random() % longest);
  }
  return ranges;
}

int Length(const DecodeItem& item) { return item.end - item.begin; }

std::vector<DecodeItem> ByPartial(std::vector<DecodeItem> items) {
  std::sort(items.begin(), items.end(),
            [](const DecodeItem& a, const DecodeItem& b) { return a.partial < b.partial; });
  return items;
}

// Check the invariants of DecodePlan.
void CheckPlan(const std::vector<DecodeRange>& ranges, int num_slots, const DecodePlan& plan) {
  int64_t longest = 0;
  REQUIRE(plan.first_partial.size() == ranges.size() + 1);
  REQUIRE(plan.first_partial.front() == 0);
  REQUIRE(plan.first_partial.back() == static_cast<int32_t>(plan.items.size()));
  const std::vector<DecodeItem> items = ByPartial(plan.items);
  for (size_t i = 0; i < ranges.size(); ++i) {
    int at = ranges[i].begin;
    longest = std::max<int64_t>(longest, ranges[i].end - ranges[i].begin);
    for (int32_t p = plan.first_partial[i]; p < plan.first_partial[i + 1]; ++p) {
      const DecodeItem& item = items[static_cast<size_t>(p)];
      REQUIRE(item.partial == p);
      REQUIRE(item.sequence == static_cast<int32_t>(i));
      REQUIRE(item.begin == at);
      REQUIRE(item.end > at);
      REQUIRE((at == ranges[i].begin || at % kItemGranule == 0));
      const bool is_whole = at == ranges[i].begin && item.end == ranges[i].end;
      REQUIRE((is_whole || Length(item) >= kMinItem));
      at = item.end;
    }
    REQUIRE(at == ranges[i].end);
  }
  for (size_t i = 1; i < plan.items.size(); ++i) {
    REQUIRE(Length(plan.items[i - 1]) >= Length(plan.items[i]));
  }
  const auto num_ranges = static_cast<int64_t>(ranges.size());
  REQUIRE(static_cast<int64_t>(plan.items.size()) <= MaxItems(num_ranges, longest, num_slots));
}

TEST_CASE("a plan covers every range once in items of at least kMinItem, longest first") {
  Random random(5);
  DecodePlan plan;
  for (int round = 0; round < 20000; ++round) {
    const std::vector<DecodeRange> ranges = RandomRanges(random);
    const int num_slots = 1 + static_cast<int>(random() % (round % 2 == 0 ? 8 : 600));
    PlanDecode(ranges, num_slots, &plan);
    CheckPlan(ranges, num_slots, plan);
  }
}

TEST_CASE("no item is much longer than an equal share") {
  Random random(6);
  DecodePlan plan;
  for (int round = 0; round < 20000; ++round) {
    const std::vector<DecodeRange> ranges = RandomRanges(random);
    const int num_slots = 1 + static_cast<int>(random() % 200);
    PlanDecode(ranges, num_slots, &plan);
    int64_t total = 0;
    for (const DecodeRange& range : ranges) {
      total += range.end - range.begin + kItemCost;
    }
    const int64_t share = std::max<int64_t>(total / num_slots + kItemCost, kMinItem);
    for (const DecodeItem& item : plan.items) {
      REQUIRE(Length(item) <= share + 2 * kItemGranule + 2 * kMinItem);
    }
  }
}

TEST_CASE("one long sequence fills the GPU") {
  constexpr int kSlots = 66;  // 132 SMs, 4 blocks each, 8 KV heads
  DecodePlan plan;
  const std::vector<DecodeRange> ranges[] = {{{0, 32768}}, {{0, 131072}}, {{0, 500000}}};
  for (const std::vector<DecodeRange>& range : ranges) {
    PlanDecode(range, kSlots, &plan);
    CHECK(plan.items.size() > kSlots * 9 / 10);
    CHECK(plan.items.size() <= kSlots);
  }
  const std::vector<DecodeRange> shorter = {{0, 8192}};
  PlanDecode(shorter, kSlots, &plan);
  CHECK(plan.items.size() == 8192 / kMinItem);
}

// For each position of a sequence, the numbers of quantized and 16-bit items that read it.
using Readers = std::vector<std::pair<int, int>>;

Readers ReadersOf(const AttentionPlan& plan, int sequence, int context) {
  Readers readers(static_cast<size_t>(context));
  const auto count = [&](const std::vector<DecodeItem>& items, int std::pair<int, int>::*which) {
    for (const DecodeItem& item : items) {
      for (int p = item.begin; item.sequence == sequence && p < item.end; ++p) {
        ++(readers.at(static_cast<size_t>(p)).*which);
      }
    }
  };
  count(plan.quantized(), &std::pair<int, int>::first);
  count(plan.window16(), &std::pair<int, int>::second);
  return readers;
}

Readers WantedReaders(const LayerRule& rule, int context) {
  Readers readers(static_cast<size_t>(context));
  for (int p = 0; p < context; ++p) {
    const bool is_seen = p >= FirstSeen(rule.window, context - 1);
    const bool is_in_window16 =
        rule.window16.enabled() &&
        rule.window16.IsInWindow16(p / rule.window16.block_seq_len, context - 1);
    readers[static_cast<size_t>(p)] = {is_seen && !is_in_window16, is_seen && is_in_window16};
  }
  return readers;
}

// Check that the partials of a sequence are those of its items, each once.
void CheckPartials(const AttentionPlan& plan, size_t num_seqs) {
  std::vector<DecodeItem> items = plan.quantized();
  items.insert(items.end(), plan.window16().begin(), plan.window16().end());
  items = ByPartial(items);
  REQUIRE(plan.first_partial.size() == num_seqs + 1);
  REQUIRE(plan.first_partial.back() == static_cast<int32_t>(items.size()));
  for (size_t i = 0; i < items.size(); ++i) {
    REQUIRE(items[i].partial == static_cast<int32_t>(i));
    const auto sequence = static_cast<size_t>(items[i].sequence);
    REQUIRE(items[i].partial >= plan.first_partial[sequence]);
    REQUIRE(items[i].partial < plan.first_partial[sequence + 1]);
  }
}

LayerRule RandomRule(Random& random) {
  LayerRule rule;
  const int windows[] = {0, 1, 30, 64, 128, 129, 1000, -1, -100, -700};
  rule.window = windows[random() % 10];
  if (random() % 4 != 0) {
    const int block = 16 << random() % 4;
    rule.window16 = MakePrecisionWindow(
        {static_cast<int>(64 * (random() % 12)), static_cast<int>(64 * (random() % 12))}, block);
  }
  return rule;
}

TEST_CASE("every visible position is read once, from the pool that the rule selects") {
  Random random(8);
  AttentionPlan plan;
  for (int round = 0; round < 3000; ++round) {
    const LayerRule rule = RandomRule(random);
    const int num_slots = 1 + static_cast<int>(random() % 40);
    std::vector<int32_t> context_lens(random() % 6);
    for (int32_t& context : context_lens) {
      context = static_cast<int32_t>(random() % (round % 2 == 0 ? 3000 : 300));
    }
    PlanAttention(context_lens, rule, num_slots, &plan);
    for (size_t i = 0; i < context_lens.size(); ++i) {
      REQUIRE(ReadersOf(plan, static_cast<int>(i), context_lens[i]) ==
              WantedReaders(rule, context_lens[i]));
    }
    CheckPartials(plan, context_lens.size());
    const auto num_seqs = static_cast<int64_t>(context_lens.size());
    REQUIRE(static_cast<int64_t>(plan.quantized().size()) <=
            rule.MaxQuantizedItems(num_seqs, num_slots));
    REQUIRE(static_cast<int64_t>(plan.window16().size()) <=
            rule.MaxWindow16Items(num_seqs, num_slots));
  }
}

TEST_CASE("layers with short windows have few items on any GPU") {
  const int num_slots = 264;
  CHECK(LayerRule{128}.MaxQuantizedItems(3, num_slots) == 3);
  CHECK(LayerRule{}.MaxQuantizedItems(3, num_slots) == 266);
  CHECK(LayerRule{}.MaxWindow16Items(3, num_slots) == 0);
  const LayerRule window16 = {128, MakePrecisionWindow({64, 128}, 64)};
  CHECK(window16.window16.IsAlwaysInWindow16(window16.window));
  CHECK(window16.MaxQuantizedItems(3, num_slots) == 0);
  CHECK(window16.MaxWindow16Items(3, num_slots) == 6);
}

}  // namespace
}  // namespace turbomind::cuda
