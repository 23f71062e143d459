#pragma once

// Which blocks of WideKernel (linear_wide.cuh) compute which items. Pure arithmetic.

#include "turbomind/core/host_device.h"

namespace turbomind::cuda {

// The items of a launch, and which steps of them each block computes.
struct WideSchedule {
  int steps;      // of an item
  int num_whole;  // items that one block computes as a whole
  int num_split;  // items after them that blocks share
  int workers;    // blocks that share them

  static constexpr int kMinSteps = 4;  // of a worker; fewer would end before their loads arrive

  TM_HD WideSchedule(int num_items, int num_steps, int num_blocks) : steps(num_steps) {
    const int rest = num_items % num_blocks;
    // Parts cost traffic. Five blocks of six are busy enough.
    num_split = rest * 6 < num_blocks * 5 ? rest : 0;
    num_whole = num_items - num_split;
    const int wanted = num_split * steps / kMinSteps;
    const int most = wanted < num_blocks ? wanted : num_blocks;
    workers = most > num_split ? most : num_split;
  }
  // Return the first of the shared steps of a worker.
  TM_HD int Begin(int worker) const { return num_split * steps * worker / workers; }
  TM_HD int WorkerOf(int shared_step) const {
    return ((shared_step + 1) * workers - 1) / (num_split * steps);
  }
};

}  // namespace turbomind::cuda
