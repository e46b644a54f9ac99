// Wires with delay, for kernels without netem: each is a pair of TAP devices in two namespaces, and what one of them
// sends the other receives so much later, in order.
//
// Arguments, for each wire: namespace, device, delay in ns of what leaves it; the same of the other end. Prints "ready"
// when all devices are there; they live as long as the process.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

namespace {

constexpr long long kSecond = 1'000'000'000;
constexpr int kHeader = 10;         // struct virtio_net_hdr: lets frames of many segments pass whole
constexpr size_t kLargest = 70'000;
constexpr int kAtOnce = 32;         // frames read from one device before the others have their turn

struct Frame {
  long long due;
  std::vector<char> bytes;
};

struct End {
  int tap = -1;
  long long delay = 0;              // ns, of what leaves this end
  std::deque<Frame> arriving;
};

[[noreturn]] void fail(const char* what) {
  perror(what);
  exit(1);
}

long long now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

int opened(const char* space, const char* device) {
  const int inside = open((std::string("/run/netns/") + space).c_str(), O_RDONLY | O_CLOEXEC);
  if (inside < 0 || setns(inside, CLONE_NEWNET)) fail(space);
  close(inside);
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap < 0) fail("/dev/net/tun");
  ifreq request = {};
  strncpy(request.ifr_name, device, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tap, TUNSETIFF, &request)) fail(device);
  int header = kHeader;
  if (ioctl(tap, TUNSETVNETHDRSZ, &header)) fail("TUNSETVNETHDRSZ");
  if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
  return tap;
}

void take(End& from, End& to) {
  static char buffer[kLargest];
  for (int i = 0; i < kAtOnce; i++) {
    const ssize_t length = read(from.tap, buffer, sizeof buffer);
    if (length <= 0) return;
    to.arriving.push_back({now() + from.delay, std::vector<char>(buffer, buffer + length)});
  }
}

void deliver(End& end) {
  while (!end.arriving.empty() && end.arriving.front().due <= now()) {
    const std::vector<char>& bytes = end.arriving.front().bytes;
    if (write(end.tap, bytes.data(), bytes.size()) < 0) {}  // a device that is down loses what arrives
    end.arriving.pop_front();
  }
}

}  // namespace

int main(int count, char** words) {
  prctl(PR_SET_TIMERSLACK, 1000);
  std::vector<End> ends((count - 1) / 3);
  for (size_t i = 0; i < ends.size(); i++) {
    ends[i].tap = opened(words[1 + 3 * i], words[2 + 3 * i]);
    ends[i].delay = atoll(words[3 + 3 * i]);
  }
  puts("ready");
  fflush(stdout);
  std::vector<pollfd> watched;
  for (const End& end : ends) watched.push_back({end.tap, POLLIN, 0});
  for (;;) {
    long long next = -1;
    for (End& end : ends) {
      deliver(end);
      if (!end.arriving.empty() && (next < 0 || end.arriving.front().due < next)) next = end.arriving.front().due;
    }
    const long long left = next < 0 ? 0 : std::max(0LL, next - now());
    const timespec wait = {left / kSecond, left % kSecond};
    if (ppoll(watched.data(), watched.size(), next < 0 ? nullptr : &wait, nullptr) < 0) fail("ppoll");
    for (size_t i = 0; i < ends.size(); i++)
      if (watched[i].revents & POLLIN) take(ends[i], ends[i ^ 1]);
  }
}
