#include "plans/plan_file.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_set>

namespace fused::plans {
namespace {

constexpr std::string_view first_line = "torch_fused_linear plans 3";
// Of one section, made for no driver in particular; nothing of it is valid any more.
constexpr std::string_view old_first_line = "torch_fused_linear plans 1";

// FNV-1a: against damage, not against malice.
uint64_t checksum(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

std::string last_line(const std::string& body) {
  std::ostringstream line;
  line.imbue(std::locale::classic());  // no thousands separators, whatever the program's locale
  line << "checksum " << std::hex << checksum(body) << '\n';
  return line.str();
}

// What follows `start` in the line; nothing where the line begins otherwise.
std::optional<std::string> after(const std::string& line, std::string_view start) {
  if (!line.starts_with(start)) return std::nullopt;
  return line.substr(start.size());
}

// Another version may know strategies that this one does not, and mean something else by the
// configurations of its own kernels.
std::optional<std::pair<PassProblem, Decision>> understood(const std::string& line,
                                                           const std::string& version) {
  auto entry = from_text(line);
  const bool own = entry && entry->second.strategy->provider == gemm::Provider::own;
  return own && version != own_version ? std::nullopt : entry;
}

std::string to_text(const std::vector<Section>& file) {
  std::string text(first_line);
  text += '\n';
  for (const auto& section : file) {
    const auto& made_for = section.made_for;
    text += "gpu " + made_for.gpu + "\ncublaslt " + std::to_string(made_for.library_version) +
            "\ndriver " + made_for.driver + "\nversion " + section.version + '\n';
    for (const auto& line : section.lines) text += line + '\n';
  }
  return text + last_line(text);
}

// Held as long as the object lives.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : descriptor_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
    TORCH_CHECK(descriptor_ >= 0, "plans: cannot open ", path, ": ", std::strerror(errno));
    int status = 0;
    while ((status = flock(descriptor_, LOCK_EX)) != 0 && errno == EINTR) {
    }
    const int error = errno;
    if (status != 0) close(descriptor_);  // no destructor runs for what was not constructed
    TORCH_CHECK(status == 0, "plans: cannot lock ", path, ": ", std::strerror(error));
  }
  ~FileLock() { close(descriptor_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

void write_durably(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  TORCH_CHECK(file != nullptr, "plans: cannot write ", path, ": ", std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size() &&
                       std::fflush(file) == 0 && fsync(fileno(file)) == 0;
  const int error = errno;
  std::fclose(file);
  TORCH_CHECK(written, "plans: cannot write ", path, ": ", std::strerror(error));
}

}  // namespace

std::vector<Section> read_plan_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  file.peek();  // of a folder only this fails
  TORCH_CHECK_VALUE(file.is_open() && !file.bad(), "plans: cannot read ", path, ": ",
                    std::strerror(errno));
  std::stringstream content;
  content << file.rdbuf();
  const auto text = content.str();

  constexpr auto refused = "; nothing of it is used";
  const auto format = std::string_view(text).substr(0, text.find('\n'));
  TORCH_CHECK_VALUE(format == first_line || format == old_first_line, "plans: ", path,
                    " is no file of plans that this version reads (expected '", first_line, "')",
                    refused);
  const auto end = std::min(text.rfind("checksum "), text.size());
  TORCH_CHECK_VALUE(text.substr(end) == last_line(text.substr(0, end)), "plans: ", path,
                    " is damaged (its checksum does not fit)", refused);

  std::vector<Section> sections;
  std::istringstream lines(text.substr(format.size() + 1, end - format.size() - 1));
  for (std::string line; std::getline(lines, line);) {
    if (const auto gpu = after(line, "gpu ")) {
      sections.push_back({{*gpu, 0, ""}, "", {}});
    } else if (sections.empty()) {
      continue;
    } else if (const auto library = after(line, "cublaslt ")) {
      sections.back().made_for.library_version = std::strtoull(library->c_str(), nullptr, 10);
    } else if (const auto driver = after(line, "driver ")) {
      sections.back().made_for.driver = *driver;
    } else if (const auto version = after(line, "version ")) {
      sections.back().version = *version;
    } else {
      sections.back().lines.push_back(line);
    }
  }
  return sections;
}

Entries entries_for(const std::vector<Section>& file, const MadeFor& here) {
  Entries entries;
  for (const auto& section : file) {
    if (section.made_for != here) continue;
    for (const auto& line : section.lines) {
      if (auto entry = understood(line, section.version)) entries.push_back(std::move(*entry));
    }
  }
  return entries;
}

std::string mismatch(const std::vector<Section>& file, const MadeFor& here) {
  if (file.empty()) return "made for no GPU";
  for (const auto& section : file) {
    if (section.made_for == here) return "";
  }
  const auto& there = file.back().made_for;
  if (there.gpu != here.gpu) return "made for " + there.gpu + ", this is " + here.gpu;
  if (there.library_version != here.library_version) {
    return "made with cuBLASLt " + std::to_string(there.library_version) + ", this is " +
           std::to_string(here.library_version);
  }
  const auto driver =
      there.driver.empty() ? "for no driver by name" : "with driver " + there.driver;
  return "made " + driver + ", this is " + here.driver;
}

void write_plan_file(const std::string& path, const MadeFor& here, const Entries& entries,
                     bool merge) {
  const FileLock lock(path + ".lock");
  std::vector<Section> file;
  try {
    if (std::filesystem::exists(path)) file = read_plan_file(path);
  } catch (const c10::ValueError&) {
    if (merge) throw;
  }
  std::unordered_set<PassProblem, PassProblemHash> ours;
  for (const auto& entry : entries) ours.insert(entry.first);
  auto mine = file.end();  // the section that this version adds to
  for (auto it = file.begin(); it != file.end(); ++it) {
    if (it->made_for != here) continue;
    std::erase_if(it->lines, [&](const std::string& line) {
      const auto entry = understood(line, it->version);
      return entry && (!merge || ours.contains(entry->first));
    });
    if (it->version == own_version) mine = it;
  }
  if (mine == file.end()) mine = file.insert(file.end(), Section{here, own_version, {}});
  for (const auto& [problem, decision] : entries) mine->lines.push_back(to_text(problem, decision));
  const auto beside = path + ".tmp";
  write_durably(beside, to_text(file));
  TORCH_CHECK(std::rename(beside.c_str(), path.c_str()) == 0, "plans: cannot write ", path, ": ",
              std::strerror(errno));
}

}  // namespace fused::plans
