#pragma once

// Gives plain structs to Python: a property per field, and the fields as a dict.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "turbomind/core/members.h"

namespace turbomind {

// Initializes any member.
struct AnyValue {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor)
};

// Returns the number of members of an aggregate.
template <class T, class... Given>
consteval size_t CountMembers() {
  if constexpr (requires { T{Given()..., AnyValue()}; }) {
    return CountMembers<T, Given..., AnyValue>();
  } else {
    return sizeof...(Given);
  }
}

// Returns the name of a member, which is in the compiler's name of this function.
template <auto kMember>
std::string MemberName() {
  const std::string_view text = __PRETTY_FUNCTION__;  // "... kMember = &turbomind::Struct::name]"
  const size_t end = text.find_first_of(";])", text.find("kMember = "));
  const size_t begin = text.rfind("::", end) + 2;
  return std::string(text.substr(begin, end - begin));
}

// Defines a property for each listed member of T. Its name is `prefix` and that of the member.
// `part` returns the T in a C. `kOthers` members of T are not listed.
template <class T, size_t kOthers = 0, class C, class... Options, class Part, auto... kMembers>
void DefMembers(pybind11::class_<C, Options...>& target, Part part, MemberList<kMembers...>,
                const std::string& prefix = "") {
  static_assert(sizeof...(kMembers) + kOthers == CountMembers<T>(), "the list misses a member");
  const auto define = [&target, part]<class V>(const std::string& name, V T::*member) {
    target.def_property(
        name.c_str(), [part, member](C& self) -> const V& { return part(self).*member; },
        [part, member](C& self, V value) { part(self).*member = std::move(value); });
  };
  (define(prefix + MemberName<kMembers>(), kMembers), ...);
}

template <class T, size_t kOthers = 0, class... Options, auto... kMembers>
void DefMembers(pybind11::class_<T, Options...>& target, MemberList<kMembers...> members) {
  const auto itself = [](T& self) -> T& { return self; };
  DefMembers<T, kOthers>(target, itself, members);
}

// Defines a constructor without arguments, to_dict() over the properties that are already defined,
// and from_dict(), which leaves the fields that are not in the dict at their defaults.
template <class C, class... Options>
void DefFields(pybind11::class_<C, Options...>& target) {
  namespace py = pybind11;
  py::list names;
  for (const auto& [name, member] :
       target.attr("__dict__").attr("items")().template cast<py::dict>()) {
    if (PyObject_TypeCheck(member.ptr(), &PyProperty_Type) != 0) {
      names.append(name);
    }
  }
  target.def(py::init<>())
      .def("to_dict",
           [names](const py::object& self) {
             py::dict values;
             for (const py::handle name : names) {
               values[name] = self.attr(name);
             }
             return values;
           })
      .def_static(
          "from_dict",
          [](const py::dict& values) {
            py::object made = py::type::of<C>()();
            for (const auto& [name, value] : values) {
              made.attr(name) = value;
            }
            return made;
          },
          py::arg("fields"));
}

}  // namespace turbomind

namespace pybind11::detail {

// Converts a struct of two members from and to a tuple.
template <class T, auto kFirst, auto kSecond>
struct PairCaster {
  using Pair = std::pair<std::decay_t<decltype(std::declval<T>().*kFirst)>,
                         std::decay_t<decltype(std::declval<T>().*kSecond)>>;
  PYBIND11_TYPE_CASTER(T, make_caster<Pair>::name);

  bool load(handle source, bool convert) {
    make_caster<Pair> pair;
    if (!pair.load(source, convert)) {
      return false;
    }
    std::tie(value.*kFirst, value.*kSecond) = cast_op<Pair>(std::move(pair));
    return true;
  }
  static handle cast(const T& from, return_value_policy policy, handle parent) {
    return make_caster<Pair>::cast(Pair(from.*kFirst, from.*kSecond), policy, parent);
  }
};

}  // namespace pybind11::detail
