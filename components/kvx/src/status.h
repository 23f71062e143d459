// The status of a call: what it threw, as a number. No exception leaves a function of the ABI.

#pragma once

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"
#include "turbomind/core/check.h"

namespace kvx {

// Calls fn. Anything but a refusal is a bug in the library, and becomes INTERNAL_ERROR.
template <class F>
kvx_status_t StatusOf(F&& fn) noexcept {
  try {
    fn();
    return KVX_STATUS_OK;
  } catch (const Refusal& refusal) {
    return refusal.status;
  } catch (const turbomind::InvalidArgument&) {
    return KVX_STATUS_INVALID_ARGUMENT;
  } catch (...) {
    return KVX_STATUS_INTERNAL_ERROR;
  }
}

}  // namespace kvx
