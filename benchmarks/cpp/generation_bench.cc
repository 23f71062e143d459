// Tokens per second of the whole engine on a device, with random weights made in memory. Usage:
//   generation_bench device=cuda gpu=0 model=llama-3-8b
// The program prints one JSON line about the device and one about the weights. Then it reads cells
// from standard input and prints JSON lines for each. Cells, with defaults:
//   mode=nvfp4 quality=raw|balanced batches=1,32,128 context=512 steps=64 prompt=2048 prompts=8
// prompts: `prompts` prompts of `prompt` tokens at once, nothing cached, until the first token of
// the last one. decode, for every batch: sequences with `context` tokens that were read before.
// While all of them run, `steps` steps are timed. Sampling is greedy.

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
constexpr int kStepTokens = 8192;    // of a step: the default of the engine
constexpr int kWindow16Tokens = 64;  // sinks and recent tokens: the default of `balanced`
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
        max_batch(*std::max_element(batches.begin(), batches.end())) {
    cell.RequireAllRead();
    if (quality != "raw" && quality != "balanced") {
      throw std::invalid_argument("quality is " + quality + "; use raw or balanced");
    }
  }
  // Early sequences decode while the prompts of late ones are read, and the engine runs ahead of
  // the thread that counts its tokens.
  int room(int batch) const { return 2 * steps + 2 * batch + batch * context / 1024; }
  int session_len() const { return std::max(prompt + 1, context + room(max_batch)) + 1; }

  EngineConfig Config() const {
    EngineConfig config;
    config.kv_format = format;
    if (quality == "balanced") {
      config.kv_quality.rotate_k = true;
      config.kv_quality.search_scales =
          format == KvCacheMode::kFp4Mx || format == KvCacheMode::kFp4Nv;
      config.kv_quality.window16 = {kWindow16Tokens, kWindow16Tokens};
    }
    config.max_batch_size = std::max(max_batch, prompts);
    config.session_len = session_len();
    config.max_prefill_token_num = kStepTokens;
    config.cache_max_entry_count = std::max(max_batch * (session_len() / kBlockTokens + 2),
                                            prompts * (prompt / kBlockTokens + 2));
    return config;
  }

  KvCacheMode format;
  std::string quality;
  std::vector<int> batches;
  int context;
  int steps;
  int prompt;
  int prompts;
  int max_batch;
};

// An engine and its running requests.
class Runner {
 public:
  Runner(const ModelConfig& model, const EngineConfig& config,
         std::shared_ptr<const Weights> weights, std::shared_ptr<Device> device, int64_t free_bytes)
      : vocab_(model.vocab_size),
        engine_(model, config, std::move(weights), std::move(device), free_bytes) {}

  // Reads prompts to their first token and returns prompt tokens per second.
  double ReadPrompts(int first_seed, int num_prompts, int length) {
    const auto begin = Clock::now();
    for (int i = 0; i < num_prompts; ++i) {
      Submit(first_seed + i, length, 1);
    }
    while (!running_.empty()) {
      Outputs();
    }
    return num_prompts * static_cast<double>(length) / SecondsSince(begin);
  }

  // Returns tokens per second while all of `batch` sequences run. ReadPrompts has read them.
  double Decode(int batch, const Work& work) {
    for (int i = 0; i < batch; ++i) {
      Submit(i, work.context, work.room(batch));
    }
    for (std::set<uint64_t> waiting = running_; !waiting.empty();) {
      for (const RequestOutput& output : Outputs()) {
        if (!output.tokens.empty()) {
          waiting.erase(output.request_id);
        }
      }
    }
    const auto begin = Clock::now();
    const int64_t before = engine_.stats().generated_tokens;
    int64_t tokens = 0;
    while (static_cast<int>(running_.size()) == batch && tokens < int64_t{work.steps} * batch) {
      Outputs();
      tokens = engine_.stats().generated_tokens - before;
    }
    const double seconds = SecondsSince(begin);
    for (const uint64_t id : running_) {
      engine_.Cancel(id);
    }
    while (!running_.empty()) {
      Outputs();
    }
    return static_cast<double>(tokens) / seconds;
  }

  void ForgetPrompts() { engine_.ClearPrefixCache(); }
  double bytes_per_token() const { return engine_.memory_plan().bytes_per_token; }

 private:
  void Submit(int seed, int length, int max_new_tokens) {
    auto request = std::make_shared<Request>();
    request->id = ++last_id_;
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int i = 0; i < length; ++i) {
      request->prompt.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(vocab_)));
    }
    request->max_new_tokens = max_new_tokens;
    request->ignore_eos = true;
    engine_.Submit(request);
    running_.insert(last_id_);
  }

  std::vector<RequestOutput> Outputs() {
    std::vector<RequestOutput> outputs = engine_.WaitOutputs(kTimeoutMs);
    if (outputs.empty()) {
      throw std::runtime_error("the engine returned no outputs: " + engine_.failure());
    }
    for (const RequestOutput& output : outputs) {
      if (!output.error.empty()) {
        throw std::runtime_error(output.error);
      }
      if (output.finish_reason != FinishReason::kNone) {
        running_.erase(output.request_id);
      }
    }
    return outputs;
  }

  int vocab_;
  uint64_t last_id_ = 0;
  std::set<uint64_t> running_;
  Engine engine_;
};

void RunWork(const Work& work, Runner& runner) {
  const auto print = [&](const char* name, int batch, int context, double speed) {
    Json()
        .Add("mode", ToString(work.format))
        .Add("quality", work.quality)
        .Add("work", name)
        .Add("batch", int64_t{batch})
        .Add("context", int64_t{context})
        .Add("tokens_per_s", speed)
        .Add("bytes_per_token", runner.bytes_per_token())
        .Print();
  };
  constexpr int kOtherSeed = 1 << 20;
  if (work.prompts > 0) {
    runner.ReadPrompts(kOtherSeed, 1, std::min(work.prompt, kBlockTokens));  // allocates memory
    runner.ForgetPrompts();
    print("prompts", work.prompts, work.prompt,
          runner.ReadPrompts(kOtherSeed, work.prompts, work.prompt));
    runner.ForgetPrompts();
  }
  runner.ReadPrompts(0, work.max_batch, work.context);
  for (const int batch : work.batches) {
    print("decode", batch, work.context, runner.Decode(batch, work));
  }
}

int Main(int argc, char** argv) {
  Cell arguments(argc, argv);
  const std::string name = arguments.Text("model", "llama-3-8b");
  const ModelConfig model = NamedModel(name);
  const DeviceChoice choice(arguments);
  arguments.RequireAllRead();
  const std::shared_ptr<Device> device = choice.Make();
  choice.Print(*device);
  const auto begin = Clock::now();
  const std::shared_ptr<const Weights> weights = RandomModel(model, *device).Build();
  device->Synchronize();
  Json()
      .Add("model", name)
      .Add("weight_bytes", weights->num_bytes())
      .Add("seconds", SecondsSince(begin))
      .Print();
  for (std::string line; std::getline(std::cin, line);) {
    try {
      Cell cell(line);
      const Work work(cell);
      const int64_t free_bytes =
          choice.uses_gpu() ? CudaFreeBytes(choice.gpu) - kSpareBytes : int64_t{1} << 36;
      Runner runner(model, work.Config(), weights, device, free_bytes);
      RunWork(work, runner);
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
