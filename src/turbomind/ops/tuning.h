#pragma once

// What a tuner times and what it finds. A device that has several kernels or schedules for one
// layer chooses between them by their times. The names of questions and kernels are the device's
// own. Other code only stores them and shows them.

#include <string>
#include <vector>

#include "turbomind/kv/layer_group.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// A linear layer of a model: the parts of ProjectParams, or the experts of GroupedLinearParams or
// GroupedGateParams.
struct LayerToTune {
  std::vector<LinearPart> parts;  // the bias is ignored
  bool grouped = false;           // the parts are experts
  int max_rows = 0;               // of x in one call
  bool normed = false;            // the call has a norm
  bool gated = false;             // the call has an activation
};

// Decode attention of layers that share block ids.
struct AttentionToTune {
  LayerGroup layers;
  int q_heads = 0;
  int max_seqs = 1;  // of a step
};

// The kernel for one question, such as "bf16 28672 x 4096, 1 row".
struct TunedChoice {
  std::string question;
  std::string kernel;
  std::string table_kernel;  // the choice of the table in the source
  double us = 0;             // microseconds of a call: the median of several rounds
  double table_us = 0;       // the same with table_kernel
};

struct TuningParams {
  std::vector<LayerToTune> layers;
  std::vector<AttentionToTune> attention;
  std::vector<TunedChoice> saved;  // found earlier on the same TuningResult::machine
  double max_seconds = 0;          // no question begins after this time
};

struct TuningResult {
  // What the choices depend on, e.g. the GPU, its driver, and the version of the kernels. Empty if
  // the device has nothing to choose.
  std::string machine;
  std::vector<TunedChoice> choices;  // for the layers: those of `saved` and the measured ones
  int num_measured = 0;
  int num_left = 0;  // questions without an answer: no time, no memory, or wrong results
  // Kernels whose results on this machine differ from those of the table's kernel. They are not
  // used: "KERNEL for QUESTION".
  std::vector<std::string> wrong;
};

}  // namespace turbomind
