// Binds the weights: NumPy arrays become a model's matrices and vectors.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/bindings/bindings.h"
#include "turbomind/bindings/enums.h"
#include "turbomind/core/check.h"
#include "turbomind/core/mapped_file.h"
#include "turbomind/model/k_bias.h"

namespace py = pybind11;

namespace turbomind {
namespace {

// Returns the bytes of `values` values, without separate scales. REQUIRES: block formats have whole
// blocks.
int64_t SourceBytes(MatrixFormat format, int64_t values) {
  return IsFloat(format) ? values * InfoOf(format).bits / 8
                         : values / SourceBlockCols(format) * SourceBlockBytes(format);
}

void RequireShape(const std::string& what, MatrixFormat format, int64_t rows, int64_t cols) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (rows < 1 || cols < 1 || rows > kLimit || cols > kLimit) {
    throw InvalidArgument(what + " has shape [" + std::to_string(rows) + ", " +
                          std::to_string(cols) + "], but sizes must be 1 to 2^30.");
  }
  if (const int block = SourceBlockCols(format); !IsFloat(format) && cols % block != 0) {
    throw InvalidArgument(what + " has " + std::to_string(cols) + " columns, but " +
                          Name(kMatrixFormats, format) + " needs a multiple of " +
                          std::to_string(block) + ".");
  }
}

void RequireArray(const std::string& what, const py::array& data, char kind, int item_bytes) {
  if (data.dtype().kind() != kind || data.itemsize() != item_bytes) {
    throw InvalidArgument(what + " has values of dtype " +
                          py::str(data.dtype()).cast<std::string>() + ", but needs " + kind +
                          std::to_string(item_bytes));
  }
  if ((data.flags() & py::array::c_style) == 0) {
    throw InvalidArgument(what + " is a strided array. Use a C-contiguous one.");
  }
}

void RequireBytes(const std::string& what, const py::array& data, int64_t want) {
  if (data.nbytes() != want) {
    throw InvalidArgument(what + " has " + std::to_string(data.nbytes()) + " bytes, but needs " +
                          std::to_string(want));
  }
}

// Returns an owner of the arrays' memory for use by any thread. It releases them with the GIL held.
std::shared_ptr<const void> KeepArrays(const py::array& data,
                                       const std::optional<py::array>& scales) {
  using Arrays = std::pair<py::array, std::optional<py::array>>;
  return {new Arrays(data, scales), [](const Arrays* arrays) {
            if (Py_IsInitialized() == 0) {
              return;  // the interpreter has already freed its objects
            }
            py::gil_scoped_acquire gil;
            delete arrays;
          }};
}

// Keeps the device alive for the weights that are packed on it.
struct PyWeightsBuilder {
  std::shared_ptr<Device> device;
  WeightsBuilder builder;

  PyWeightsBuilder(const ModelConfig& config, std::shared_ptr<Device> target, bool exact)
      : device(std::move(target)), builder(config, *device, exact) {}

  // Returns the weights with an owner that also keeps the device alive.
  std::shared_ptr<const Weights> WithDevice(std::shared_ptr<const Weights> weights) const {
    struct Both {
      std::shared_ptr<Device> device;
      std::shared_ptr<const Weights> weights;
    };
    const Weights* address = weights.get();
    return {std::make_shared<Both>(device, std::move(weights)), address};
  }

  void AddMatrix(const std::string& name, const std::string& format_name, const py::array& data,
                 int64_t rows, int64_t cols, const std::optional<py::array>& scales) {
    const MatrixFormat format = Parse("format", kMatrixFormats, format_name);
    const std::string what = "matrix " + name;
    RequireShape(what, format, rows, cols);
    const bool in_blocks = !IsFloat(format);
    const bool is_f32 = format == MatrixFormat::kF32;
    RequireArray(what, data, is_f32 ? 'f' : 'u', is_f32 ? 4 : in_blocks ? 1 : 2);
    RequireBytes(what + " (" + format_name + ")", data, SourceBytes(format, rows * cols));
    MatrixSource source{format, data.data(), rows, cols};
    const bool is_nvfp4 = format == MatrixFormat::kNvfp4;
    const bool has_scales = is_nvfp4 || format == MatrixFormat::kMxfp4Split || IsFp8(format);
    if (has_scales != scales.has_value()) {
      throw InvalidArgument(
          what + " has " +
          (has_scales ? "no separate scales, but format " : "separate scales, but format ") +
          format_name + (has_scales ? " needs them." : " must not have them."));
    }
    if (is_nvfp4) {
      RequireArray(what + " (scales)", *scales, 'f', 4);
      RequireBytes(what + " (scales)", *scales, 4);
      std::memcpy(&source.factor, scales->data(), sizeof(source.factor));
    } else if (scales) {
      const bool is_fp8 = IsFp8(format);
      RequireArray(what + " (scales)", *scales, is_fp8 ? 'f' : 'u', is_fp8 ? 4 : 1);
      RequireBytes(what + " (scales)", *scales,
                   is_fp8 ? rows * NumFp8Scales(format, cols) * 4 : rows * cols / 32);
      source.scales = scales->data();
    }
    if (IsMxfp4(format)) {
      source.owner = KeepArrays(data, scales);
    }
    py::gil_scoped_release released;
    builder.AddMatrix(name, source);
  }

  // Adds a packed matrix. With `in_place` the array is read in place and held.
  void AddPacked(const std::string& name, const std::string& format_name, const py::array& data,
                 int64_t rows, int64_t cols, bool in_place) {
    const MatrixFormat format = Parse("format", kMatrixFormats, format_name);
    const std::string what = "packed matrix " + name;
    RequireShape(what, format, rows, cols);
    if (IsMxfp4(format) || IsFp8(format)) {
      throw InvalidArgument(what + " has format " + format_name +
                            ", which is never packed. Use add_matrix.");
    }
    RequireArray(what, data, 'u', 1);
    RequireBytes(what + " (" + format_name + ")", data, PackedBytes(format, rows, cols));
    MatrixSource source{format, data.data(), rows, cols};
    source.packed = true;
    if (in_place) {
      source.owner = KeepArrays(data, std::nullopt);
    }
    py::gil_scoped_release released;
    builder.AddMatrix(name, source);
  }

  // Returns the tiles of every packed matrix by name. The arrays keep the weights alive.
  py::dict Packed() const {
    py::dict result;
    for (const auto& [name, matrix] : builder.Matrices()) {
      if (matrix->packed_data() == nullptr) {
        continue;
      }
      auto* weights = new std::shared_ptr<const Weights>(WithDevice(builder.weights()));
      const py::capsule owner(
          weights, [](void* p) { delete static_cast<std::shared_ptr<const Weights>*>(p); });
      py::array_t<uint8_t> bytes(matrix->num_bytes(), matrix->packed_data(), owner);
      bytes.attr("setflags")(py::arg("write") = false);
      result[py::str(name)] =
          py::make_tuple(Name(kMatrixFormats, matrix->format), matrix->rows, matrix->cols, bytes);
    }
    return result;
  }

  void AddVector(const std::string& name,
                 const py::array_t<float, py::array::c_style | py::array::forcecast>& data) {
    builder.AddVector(name, data.data(), data.size());
  }
};

// The array's object keeps the memory mapped; Python destroys MappedFile before it.
std::unique_ptr<MappedFile> MakeMappedFile(const py::buffer& bytes, std::string name) {
  const py::buffer_info info = bytes.request();
  return std::make_unique<MappedFile>(info.ptr, static_cast<size_t>(info.size * info.itemsize),
                                      std::move(name));
}

}  // namespace

void DefWeights(py::module_& m) {
  py::class_<MappedFile>(m, "MappedFile")
      .def(py::init(&MakeMappedFile), py::arg("bytes"), py::arg("name"));
  m.def("check_mapped_file", [](const py::buffer& bytes) { CheckMappedFile(bytes.request().ptr); });
  py::class_<Weights, std::shared_ptr<Weights>>(m, "Weights")
      .def_property_readonly("num_bytes", &Weights::num_bytes);
  py::class_<PyWeightsBuilder>(m, "WeightsBuilder")
      .def(py::init<const ModelConfig&, std::shared_ptr<Device>, bool>(), py::arg("config"),
           py::arg("device").none(false), py::arg("exact"))
      .def("add_matrix", &PyWeightsBuilder::AddMatrix, py::arg("name"), py::arg("format"),
           py::arg("data"), py::arg("rows"), py::arg("cols"), py::arg("scales") = py::none())
      .def("add_packed", &PyWeightsBuilder::AddPacked, py::arg("name"), py::arg("format"),
           py::arg("data"), py::arg("rows"), py::arg("cols"), py::kw_only(), py::arg("in_place"))
      .def("add_vector", &PyWeightsBuilder::AddVector, py::arg("name"), py::arg("data"))
      .def("packed", &PyWeightsBuilder::Packed)
      .def("build", [](PyWeightsBuilder& self) {
        // Removes const: Python has no way to change the weights.
        return std::const_pointer_cast<Weights>(self.WithDevice(self.builder.Build()));
      });
  m.def(
      "k_bias_left",
      [](const ModelConfig& model, const Weights& weights, Device& device, int block_seq_len) {
        return KBiasLeft(model, weights, device, block_seq_len);
      },
      py::arg("model"), py::arg("weights"), py::arg("device"), py::kw_only(),
      py::arg("block_seq_len"));
  m.attr("packed_layout_id") = kPackedLayoutId;
  m.def(
      "packed_bytes",
      [](const std::string& format, int64_t rows, int64_t cols) {
        const MatrixFormat parsed = Parse("format", kMatrixFormats, format);
        RequireShape("packed matrix", parsed, rows, cols);
        return PackedBytes(parsed, rows, cols);
      },
      py::arg("format"), py::arg("rows"), py::arg("cols"));
}

}  // namespace turbomind
