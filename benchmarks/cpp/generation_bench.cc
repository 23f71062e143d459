// Tokens per second of the whole engine on a device, with a model of random weights that never
// touches a disk. Usage:
//   generation_bench device=cuda gpu=0 model=llama-3-8b
// Models: see random_model.h. The program prints one JSON line about the device and one about the
// weights. Then it reads cells from standard input and prints JSON lines for each. Cells, with
// defaults:
//   mode=nvfp4 quality=raw|balanced batches=1,32,128 context=512 steps=64 prompt=2048 prompts=8
//     rough=0
// prompts: `prompts` prompts of `prompt` tokens, all at once, nothing cached, to the last one's
// first token. decode, for every batch: sequences with `context` tokens each, all running, `steps`
// steps; their prompts were read before. Sampling is greedy; every token counts. rough=1: what the
// engine did in the time is enough, for tests.

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "bench_device.h"
#include "bench_line.h"
#include "random_model.h"
#include "run_main.h"
#include "turbomind/engine/engine.h"

namespace turbomind::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 120'000;
constexpr int kStepTokens = 8192;    // of a step: the engine's default
constexpr int kWindow16Tokens = 64;  // sinks and recent ones: the default of `balanced`
constexpr int64_t kSpareBytes = int64_t{2} << 30;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    numbers.push_back(Cell("n=" + word).Number("n", 0));
  }
  return numbers;
}

struct Work {
  explicit Work(Cell& cell)
      : format(GetKvCacheMode(cell.Text("mode", "nvfp4"), DeviceCapability())),
        quality(cell.Text("quality", "raw")),
        batches(Numbers(cell.Text("batches", "1,32,128"))),
        context(cell.Number("context", 512)),
        steps(cell.Number("steps", 64)),
        prompt(cell.Number("prompt", 2048)),
        prompts(cell.Number("prompts", 8)),
        rough(cell.Number("rough", 0) != 0) {
    cell.RequireAllRead();
    if (quality != "raw" && quality != "balanced") {
      throw std::invalid_argument("quality: got " + quality + ", wanted raw or balanced");
    }
  }
  // Early sequences decode while the prompts of late ones are read, and the engine runs ahead of
  // whoever counts its tokens.
  int room(int batch) const { return 2 * steps + 2 * batch + batch * context / 1024; }
  int max_batch() const {
    return batches.empty() ? 1 : *std::max_element(batches.begin(), batches.end());
  }
  int session_len() const { return std::max(prompt + 1, context + room(max_batch())) + 1; }
  int num_blocks() const {
    const int decoding = max_batch() * (session_len() / kBlockTokens + 2);
    return std::max(decoding, prompts * (prompt / kBlockTokens + 2));
  }

  KvCacheMode format;
  std::string quality;
  std::vector<int> batches;
  int context;
  int steps;
  int prompt;
  int prompts;
  bool rough;
};

EngineConfig ConfigOf(const Work& work) {
  EngineConfig config;
  config.kv_format = work.format;
  if (work.quality == "balanced") {
    const bool fp4 = work.format == KvCacheMode::kFp4Mx || work.format == KvCacheMode::kFp4Nv;
    config.kv_quality.rotate_k = true;
    config.kv_quality.search_scales = fp4;
    config.kv_quality.window16 = {kWindow16Tokens, kWindow16Tokens};
  }
  config.max_batch_size = std::max(work.max_batch(), work.prompts);
  config.session_len = work.session_len();
  config.max_prefill_token_num = kStepTokens;
  config.cache_max_entry_count = work.num_blocks();
  return config;
}

struct Target {
  std::shared_ptr<Device> device;
  DeviceChoice choice;
};

// An engine that is asked and waited for.
class Runner {
 public:
  Runner(const ModelConfig& model, const EngineConfig& config,
         std::shared_ptr<const Weights> weights, const Target& target)
      : vocab_(model.vocab_size),
        engine_(model, config, std::move(weights), target.device, FreeBytes(target)) {}

  // Prompt tokens per second.
  double ReadPrompts(int num_prompts, int length) {
    engine_.ClearPrefixCache();
    const auto begin = Clock::now();
    std::set<uint64_t> running;
    for (int i = 0; i < num_prompts; ++i) {
      running.insert(Submit(kOtherSeed + i, length, 1));
    }
    Drain(running);
    return num_prompts * static_cast<double>(length) / SecondsSince(begin);
  }

  // Reads the prompts of sequences [0, batch): the cache has them afterwards.
  void Remember(int batch, int context) {
    std::set<uint64_t> running;
    for (int i = 0; i < batch; ++i) {
      running.insert(Submit(i, context, 1));
    }
    Drain(running);
  }

  // Tokens per second while all of `batch` sequences run.
  double Decode(int batch, const Work& work) {
    std::set<uint64_t> running;
    for (int i = 0; i < batch; ++i) {
      running.insert(Submit(i, work.context, work.room(batch)));
    }
    std::set<uint64_t> waiting = running;
    while (!waiting.empty()) {
      for (const RequestOutput& output : Outputs()) {
        if (!output.tokens.empty()) {
          waiting.erase(output.request_id);
        }
        Note(output, running);
      }
    }
    const int64_t wanted = int64_t{work.steps} * batch;
    const auto begin = Clock::now();
    const int64_t before = engine_.stats().generated_tokens;
    int64_t tokens = 0;
    while (static_cast<int>(running.size()) == batch && tokens < wanted) {
      for (const RequestOutput& output : Outputs()) {
        Note(output, running);
      }
      tokens = engine_.stats().generated_tokens - before;
    }
    const double seconds = SecondsSince(begin);
    for (const uint64_t id : running) {
      engine_.Cancel(id);
    }
    Drain(running);
    if (tokens < wanted && !work.rough) {
      throw std::runtime_error("a sequence ended before all steps were timed");
    }
    return static_cast<double>(tokens) / seconds;
  }

  MemoryPlan memory_plan() const { return engine_.memory_plan(); }

 private:
  static constexpr int kOtherSeed = 1 << 20;

  static int64_t FreeBytes(const Target& target) {
    return target.choice.uses_gpu() ? CudaFreeBytes(target.choice.gpu) - kSpareBytes
                                    : int64_t{1} << 36;
  }

  uint64_t Submit(int seed, int length, int max_new_tokens) {
    auto request = std::make_shared<Request>();
    request->id = ++last_id_;
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int i = 0; i < length; ++i) {
      request->prompt.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(vocab_)));
    }
    request->max_new_tokens = max_new_tokens;
    request->ignore_eos = true;
    engine_.Submit(request);
    return last_id_;
  }

  std::vector<RequestOutput> Outputs() {
    std::vector<RequestOutput> outputs = engine_.WaitOutputs(kTimeoutMs);
    if (outputs.empty()) {
      throw std::runtime_error("the engine gave nothing: " + engine_.failure());
    }
    for (const RequestOutput& output : outputs) {
      if (!output.error.empty()) {
        throw std::runtime_error(output.error);
      }
    }
    return outputs;
  }

  static void Note(const RequestOutput& output, std::set<uint64_t>& running) {
    if (output.finish_reason != FinishReason::kNone) {
      running.erase(output.request_id);
    }
  }

  void Drain(std::set<uint64_t>& running) {
    while (!running.empty()) {
      for (const RequestOutput& output : Outputs()) {
        Note(output, running);
      }
    }
  }

  int vocab_;
  uint64_t last_id_ = 0;
  Engine engine_;
};

Json Row(const Work& work) {
  Json row;
  row.Add("mode", ToString(work.format)).Add("quality", work.quality);
  return row;
}

void RunWork(const Work& work, const ModelConfig& model,
             const std::shared_ptr<const Weights>& weights, const Target& target) {
  Runner runner(model, ConfigOf(work), weights, target);
  const double bytes_per_token = runner.memory_plan().bytes_per_token;
  if (work.prompts > 0) {
    runner.ReadPrompts(1, std::min(work.prompt, kBlockTokens));  // allocates what steps need
    Row(work)
        .Add("work", "prompts")
        .Add("batch", int64_t{work.prompts})
        .Add("context", int64_t{work.prompt})
        .Add("tokens_per_s", runner.ReadPrompts(work.prompts, work.prompt))
        .Add("bytes_per_token", bytes_per_token)
        .Print();
  }
  runner.Remember(work.max_batch(), work.context);
  for (const int batch : work.batches) {
    Row(work)
        .Add("work", "decode")
        .Add("batch", int64_t{batch})
        .Add("context", int64_t{work.context})
        .Add("tokens_per_s", runner.Decode(batch, work))
        .Add("bytes_per_token", bytes_per_token)
        .Print();
  }
}

int Main(int argc, char** argv) {
  std::string words;
  for (int i = 1; i < argc; ++i) {
    words += std::string(argv[i]) + " ";
  }
  Cell arguments(words);
  const std::string name = arguments.Text("model", "llama-3-8b");
  const ModelConfig model = NamedModel(name);
  const DeviceChoice choice(arguments);
  arguments.RequireAllRead();
  const Target target = {choice.Make(), choice};
  choice.Print(*target.device);
  const auto begin = Clock::now();
  const std::shared_ptr<const Weights> weights = RandomModel(model, *target.device).Build();
  target.device->Synchronize();
  Json()
      .Add("model", name)
      .Add("weight_bytes", weights->num_bytes())
      .Add("seconds", SecondsSince(begin))
      .Print();
  for (std::string line; std::getline(std::cin, line);) {
    if (line.empty()) {
      continue;
    }
    try {
      Cell cell(line);
      RunWork(Work(cell), model, weights, target);
    } catch (const std::bad_alloc&) {
      Json().Add("skipped", "the device has too little memory").Print();
    } catch (const std::exception& error) {
      Json().Add("error", error.what()).Print();
    }
    Json().Add("done", line).Print();
  }
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("generation_bench", turbomind::bench::Main, argc, argv);
}
