#pragma once

// Input and output of the benchmark programs: one line of key=value pairs, one line of JSON.

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace turbomind::bench {

// The key=value pairs of one line, which select what to measure.
class Cell {
 public:
  // Throws std::invalid_argument for a word without '=' and for a repeated key.
  explicit Cell(std::string_view line) {
    while (!line.empty()) {
      const size_t end = line.find(' ');
      Add(line.substr(0, end));
      line = end == std::string_view::npos ? std::string_view() : line.substr(end + 1);
    }
  }
  // Reads the arguments of a program.
  Cell(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      Add(argv[i]);
    }
  }

  // Sets `key` to `otherwise` if the line does not have it.
  void SetDefault(const std::string& key, const std::string& otherwise) {
    values_.emplace(key, std::pair(otherwise, false));
  }

  std::string Text(const std::string& key, const std::string& otherwise = "") {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      return otherwise;
    }
    found->second.second = true;
    return found->second.first;
  }

  int Number(const std::string& key, int otherwise) {
    const std::string text = Text(key);
    if (text.empty()) {
      return otherwise;
    }
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0) {
      throw std::invalid_argument(key + " is " + text + ". It must be a number of at least 0.");
    }
    return value;
  }

  // Throws std::invalid_argument for a key that was never read.
  void RequireAllRead() const {
    for (const auto& [key, value] : values_) {
      if (!value.second) {
        throw std::invalid_argument(key + " is unknown here.");
      }
    }
  }

 private:
  void Add(std::string_view word) {
    if (word.empty()) {
      return;
    }
    const size_t at = word.find('=');
    if (at == std::string_view::npos) {
      throw std::invalid_argument(std::string(word) + " is not of the form key=value.");
    }
    const std::string key(word.substr(0, at));
    if (!values_.emplace(key, std::pair(std::string(word.substr(at + 1)), false)).second) {
      throw std::invalid_argument(key + " is given twice.");
    }
  }

  std::map<std::string, std::pair<std::string, bool>> values_;  // value, whether it was read
};

// One JSON object on a line of its own.
class Json {
 public:
  Json& Add(const std::string& key, const std::string& value) {
    std::string text;
    for (const char c : value) {
      text += c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return Raw(key, '"' + text + '"');
  }
  Json& Add(const std::string& key, const char* value) { return Add(key, std::string(value)); }
  Json& Add(const std::string& key, int64_t value) { return Raw(key, std::to_string(value)); }
  Json& Add(const std::string& key, double value) {
    char text[40];
    std::snprintf(text, sizeof(text), "%.6g", value);
    return Raw(key, std::isfinite(value) ? text : "null");
  }

  Json& Add(const std::string& key, const std::vector<Json>& objects) {
    std::string text;
    for (const Json& object : objects) {
      text += (text.empty() ? "{" : ", {") + object.text_ + "}";
    }
    return Raw(key, "[" + text + "]");
  }

  void Print() const {
    std::printf("{%s}\n", text_.c_str());
    std::fflush(stdout);
  }

 private:
  Json& Raw(const std::string& key, const std::string& value) {
    text_ += (text_.empty() ? "\"" : ", \"") + key + "\": " + value;
    return *this;
  }

  std::string text_;
};

// Runs main(argc, argv) and returns its exit status. Prints an exception on stderr and returns 2.
inline int RunMain(const char* program, int (*main)(int, char**), int argc, char** argv) {
  try {
    return main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 2;
  }
}

}  // namespace turbomind::bench
