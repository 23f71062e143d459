// Binds requests and outputs.

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/bindings/fields.h"
#include "turbomind/core/check.h"

namespace py = pybind11;

template <>
struct py::detail::type_caster<turbomind::TokenLogprobs>
    : PairCaster<turbomind::TokenLogprobs, &turbomind::TokenLogprobs::chosen,
                 &turbomind::TokenLogprobs::top> {};

namespace turbomind {
namespace {

constexpr EnumName<LogitsOutput> kLogitsOutputs[] = {{LogitsOutput::kNone, "none"},
                                                     {LogitsOutput::kGeneration, "generation"},
                                                     {LogitsOutput::kAll, "all"}};
constexpr EnumName<Pooling> kPoolings[] = {
    {Pooling::kNone, "none"}, {Pooling::kLast, "last"}, {Pooling::kMean, "mean"}};
constexpr EnumName<FinishReason> kFinishReasons[] = {{FinishReason::kNone, "none"},
                                                     {FinishReason::kStop, "stop"},
                                                     {FinishReason::kLength, "length"},
                                                     {FinishReason::kCancelled, "cancelled"},
                                                     {FinishReason::kError, "error"}};

// Calls and destroys a Python callable with the GIL held, from any thread.
class PyTokenMask {
 public:
  explicit PyTokenMask(py::object fn)
      : fn_(new py::object(std::move(fn)), [](py::object* object) {
          py::gil_scoped_acquire gil;
          delete object;
        }) {}

  bool operator()(const std::vector<int32_t>& new_tokens, std::vector<uint32_t>& mask) const {
    py::gil_scoped_acquire gil;
    try {
      // Python owns the array, so a callback may keep it without access to our memory.
      py::array_t<int32_t> words(static_cast<py::ssize_t>(mask.size()));
      std::memcpy(words.mutable_data(), mask.data(), mask.size() * sizeof(uint32_t));
      const bool go_on = (*fn_)(new_tokens, words).cast<bool>();
      std::memcpy(mask.data(), words.data(), mask.size() * sizeof(uint32_t));
      return go_on;
    } catch (const py::error_already_set& error) {
      // OptionError of checks.py: the request asked for something impossible.
      if (error.matches(PyExc_ValueError) && py::hasattr(error.value(), "field") &&
          py::hasattr(error.value(), "reason")) {
        throw InvalidArgument(py::str(error.value().attr("field")).cast<std::string>(),
                              py::str(error.value().attr("reason")).cast<std::string>());
      }
      throw std::runtime_error(py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
                               py::str(error.value()).cast<std::string>());
    } catch (const py::cast_error&) {
      throw std::runtime_error("The callback must return a bool.");
    }
  }

  py::object object() const { return *fn_; }

 private:
  std::shared_ptr<py::object> fn_;
};

py::object GetTokenMask(const Request& request) {
  const auto* mask = request.token_mask.target<PyTokenMask>();
  return mask == nullptr ? py::object(py::none()) : mask->object();
}

void SetTokenMask(Request& request, const py::object& fn) {
  if (fn.is_none()) {
    request.token_mask = nullptr;
    return;
  }
  if (PyCallable_Check(fn.ptr()) == 0) {
    throw InvalidArgument("token_mask", "has type " +
                                            py::str(py::type::of(fn)).cast<std::string>() +
                                            ", but must be a callable or None.");
  }
  request.token_mask = PyTokenMask(fn);
}

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

// Returns [n, vocab] as a view of the output's memory. The array keeps the output alive.
py::object GetLogits(const py::object& self) {
  auto& output = self.cast<RequestOutput&>();
  if (output.logits.empty()) {
    return py::none();
  }
  const auto rows = static_cast<py::ssize_t>(output.logits_rows);
  const auto cols = static_cast<py::ssize_t>(output.logits.size()) / rows;
  return py::array_t<float>({rows, cols}, output.logits.data(), self);
}

void SetLogits(RequestOutput& output, const std::optional<Floats>& logits) {
  output.logits.clear();
  if (logits && logits->ndim() != 2) {
    throw InvalidArgument("logits", "must have 2 dimensions.");
  }
  if (logits) {
    output.logits_rows = logits->shape(0);
    output.logits.assign(logits->data(), logits->data() + logits->size());
  }
}

// Returns [hidden_size] as a view of the output's memory, like GetLogits.
py::object GetPooled(const py::object& self) {
  auto& output = self.cast<RequestOutput&>();
  if (output.pooled.empty()) {
    return py::none();
  }
  return py::array_t<float>(static_cast<py::ssize_t>(output.pooled.size()), output.pooled.data(),
                            self);
}

void SetPooled(RequestOutput& output, const std::optional<Floats>& pooled) {
  output.pooled.clear();
  if (pooled) {
    output.pooled.assign(pooled->data(), pooled->data() + pooled->size());
  }
}

}  // namespace

CacheSalt ToCacheSalt(const py::bytes& bytes) {
  const std::string text = bytes;
  CacheSalt salt;
  if (text.size() != sizeof(salt)) {
    throw InvalidArgument("cache_salt", "must have 16 bytes");
  }
  std::memcpy(salt.data(), text.data(), sizeof(salt));
  return salt;
}

void DefRequest(py::module_& m) {
  py::class_<Request, std::shared_ptr<Request>> request(m, "Request");
  DefMembers<Request, 5>(
      request, MemberList<&Request::id, &Request::prompt, &Request::priority, &Request::num_resumed,
                          &Request::max_new_tokens, &Request::ignore_eos,
                          &Request::num_prompt_logprobs, &Request::long_rope>());
  DefMembers<SamplingRequest, 2>(
      request, [](Request& self) -> SamplingRequest& { return self; },
      MemberList<&Request::min_new_tokens, &Request::eos_ids, &Request::stop_sequences,
                 &Request::bad_sequences>());
  request.def_property("token_mask", &GetTokenMask, &SetTokenMask)
      .def_property(
          "cache_salt",
          [](const Request& self) {
            return py::bytes(reinterpret_cast<const char*>(self.cache_salt.data()),
                             sizeof(CacheSalt));
          },
          [](Request& self, const py::bytes& salt) { self.cache_salt = ToCacheSalt(salt); });
  DefEnum(request, "logits_output", &Request::logits_output, kLogitsOutputs);
  DefEnum(request, "pooling", &Request::pooling, kPoolings);
  DefMembers<SamplingParams>(
      request, [](Request& self) -> SamplingParams& { return self.sampling; },
      SamplingParams::Members());
  DefFields(request);

  py::class_<RequestOutput> output(m, "RequestOutput");
  DefMembers<RequestOutput, 4>(
      output,
      MemberList<&RequestOutput::request_id, &RequestOutput::tokens, &RequestOutput::logprobs,
                 &RequestOutput::prompt_logprobs, &RequestOutput::stop_tokens,
                 &RequestOutput::cached_tokens, &RequestOutput::error,
                 &RequestOutput::is_request_fault, &RequestOutput::error_field>());
  output.def_property("logits", &GetLogits, &SetLogits)
      .def_property("pooled", &GetPooled, &SetPooled);
  DefEnum(output, "finish_reason", &RequestOutput::finish_reason, kFinishReasons);
  DefFields(output);
}

}  // namespace turbomind
