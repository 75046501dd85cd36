#include "plans/plan_file.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_set>

namespace fused::plans {
namespace {

constexpr auto first_line = "torch_fused_linear plans 1";

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

std::string take_line(std::istream& in, const std::string& start) {
  std::string line;
  const bool good = std::getline(in, line) && line.starts_with(start);
  return good ? line.substr(start.size()) : "";
}

// Another version may know strategies that this one does not, and mean something else by the
// configurations of its own kernels.
bool is_understood(const std::optional<std::pair<PassProblem, Decision>>& entry,
                   const std::string& version) {
  if (version == own_version) return true;
  return entry && entry->second.strategy->provider != gemm::Provider::own;
}

std::string to_text(const PlanFile& plans) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << first_line << "\ngpu " << plans.gpu << "\ncublaslt " << plans.library_version
       << "\nversion " << own_version << '\n';
  for (const auto& [problem, decision] : plans.decisions) {
    text << to_text(problem, decision) << '\n';
  }
  return text.str() + last_line(text.str());
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

PlanFile read_plan_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "plans: cannot read ", path, ": ", std::strerror(errno));
  std::stringstream content;
  content << file.rdbuf();
  const auto text = content.str();

  constexpr auto refused = "; nothing of it is used";
  TORCH_CHECK_VALUE(text.starts_with(first_line), "plans: ", path, " is no file of plans",
                    " (expected '", first_line, "')", refused);
  const auto end = std::min(text.rfind("checksum "), text.size());
  TORCH_CHECK_VALUE(text.substr(end) == last_line(text.substr(0, end)), "plans: ", path,
                    " is damaged (its checksum does not fit)", refused);

  std::istringstream lines(text.substr(0, end));
  PlanFile plans;
  take_line(lines, first_line);
  plans.gpu = take_line(lines, "gpu ");
  plans.library_version = std::strtoull(take_line(lines, "cublaslt ").c_str(), nullptr, 10);
  for (std::string line; std::getline(lines, line);) {
    if (plans.decisions.empty() && line.starts_with("version ")) {
      plans.version = line.substr(std::string_view("version ").size());
      continue;
    }
    auto entry = from_text(line);
    if (!is_understood(entry, plans.version)) continue;
    TORCH_CHECK_VALUE(entry, "plans: ", path, " holds a line that is no plan: '", line, "'",
                      refused);
    plans.decisions.push_back(std::move(*entry));
  }
  return plans;
}

void write_plan_file(const std::string& path, PlanFile plans, bool merge) {
  const FileLock lock(path + ".lock");
  if (merge && std::filesystem::exists(path)) {
    std::unordered_set<PassProblem, PassProblemHash> ours;
    for (const auto& entry : plans.decisions) ours.insert(entry.first);
    const auto there = read_plan_file(path);
    const auto why = mismatch(there, plans.gpu, plans.library_version);
    TORCH_CHECK_VALUE(why.empty(), "plans: ", path, " was ", why, "; it is left as it is");
    for (const auto& entry : there.decisions) {
      if (!ours.contains(entry.first)) plans.decisions.push_back(entry);
    }
  }
  const auto beside = path + ".tmp";
  write_durably(beside, to_text(plans));
  TORCH_CHECK(std::rename(beside.c_str(), path.c_str()) == 0, "plans: cannot write ", path, ": ",
              std::strerror(errno));
}

std::string mismatch(const PlanFile& have, const std::string& gpu, size_t library_version) {
  std::ostringstream text;
  if (have.gpu != gpu) {
    text << "made for " << have.gpu << ", this is " << gpu;
  } else if (have.library_version != library_version) {
    text << "made with cuBLASLt " << have.library_version << ", this is " << library_version;
  }
  return text.str();
}

}  // namespace fused::plans
